"""The lag rule, by table and by simulation of every order that can happen."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.admission import (
    LagBudget,
    batches_left,
    capacity,
    feasible,
    may_lease,
    trainable,
)
from correction.errors import InputError


@pytest.mark.parametrize(
    ("max_lag", "passes", "learner", "oldest", "expected"),
    [
        (0, 1, 5, 5, 1),  # on-policy: this batch only
        (0, 1, 5, 4, 0),  # one version old is too old
        (2, 1, 5, 5, 3),
        (2, 1, 5, 3, 1),  # exactly at the bound is accepted
        (2, 1, 5, 2, 0),
        (2, 2, 5, 5, 1),  # two passes: the second sees one version more
        (2, 2, 5, 4, 1),
        (2, 2, 5, 3, 0),
        (3, 2, 5, 5, 2),
        (2, 3, 5, 5, 1),
        (2, 3, 5, 4, 0),
        (4, 1, 5, 9, 5),  # from the future: not this rule's business
    ],
)
def test_batches_left_table(
    max_lag: int, passes: int, learner: int, oldest: int, expected: int
) -> None:
    budget = LagBudget(max_lag, groups_per_step=4, steps_per_batch=passes)
    assert batches_left(budget, learner, oldest) == expected
    assert trainable(budget, learner, oldest) == (expected > 0)


@pytest.mark.parametrize(
    ("max_lag", "outstanding", "learner", "behaviour", "expected"),
    [
        (0, {}, 0, 0, 4),
        (0, {0: 3}, 0, 0, 1),
        (0, {0: 4}, 0, 0, 0),
        (0, {}, 1, 0, 0),  # the engine has not swapped yet
        (2, {}, 0, 0, 12),
        (2, {0: 8}, 1, 1, 4),
        (2, {0: 8}, 1, 0, 0),
        (2, {1: 8}, 1, 0, 4),  # newer groups may wait behind older ones
    ],
)
def test_capacity_table(
    max_lag: int, outstanding: dict[int, int], learner: int, behaviour: int, expected: int
) -> None:
    assert capacity(LagBudget(max_lag, 4), learner, outstanding, behaviour) == expected


def test_more_passes_than_the_bound_allows_are_refused() -> None:
    with pytest.raises(InputError, match="2 versions of lag, more than the bound of 1"):
        LagBudget(1, 4, steps_per_batch=3)


@given(
    max_lag=st.integers(0, 6),
    per_step=st.integers(1, 5),
    outstanding=st.dictionaries(st.integers(0, 10), st.integers(1, 9), max_size=5),
    learner=st.integers(0, 10),
    behaviour=st.integers(0, 10),
)
def test_capacity_is_the_largest_feasible_addition(
    max_lag: int, per_step: int, outstanding: dict[int, int], learner: int, behaviour: int
) -> None:
    budget = LagBudget(max_lag, per_step)
    room = capacity(budget, learner, outstanding, behaviour)
    if not feasible(budget, learner, outstanding):
        return
    for extra in (room, room + 1):
        trial = Counter(outstanding)
        trial[behaviour] += extra
        assert feasible(budget, learner, +trial) == (extra == room)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    max_lag=st.integers(0, 4),
    per_step=st.integers(1, 4),
    passes=st.integers(1, 3),
)
def test_any_order_of_finishing_keeps_the_bound_and_never_blocks(
    data: st.DataObject, max_lag: int, per_step: int, passes: int
) -> None:
    if passes - 1 > max_lag:
        return
    budget = LagBudget(max_lag, per_step, passes)
    learner = engine = 0
    in_flight: list[int] = []
    ready: list[int] = []
    trained_steps = 0
    for _ in range(60):
        action = data.draw(st.sampled_from(["admit", "finish", "lease", "swap"]))
        outstanding = Counter(in_flight) + Counter(ready)
        if action == "admit":
            room = capacity(budget, learner, outstanding, engine)
            in_flight += [engine] * data.draw(st.integers(0, room))
        elif action == "finish" and in_flight:
            ready.append(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
        elif action == "swap":
            engine = learner
        elif action == "lease" and len(ready) >= per_step:
            ready.sort()
            batch, rest = ready[:per_step], ready[per_step:]
            if may_lease(budget, learner, Counter(in_flight) + Counter(rest)):
                ready = rest
                assert all(learner + passes - 1 - oldest <= max_lag for oldest in batch)
                learner += passes
                trained_steps += passes
        assert feasible(budget, learner, Counter(in_flight) + Counter(ready))
    # Whatever happened, finishing everything and swapping always lets the learner go on.
    ready = sorted(ready + in_flight)
    in_flight = []
    while len(ready) >= per_step:
        assert may_lease(budget, learner, Counter(ready[per_step:]))
        ready = ready[per_step:]
        learner += passes
    assert len(ready) + capacity(budget, learner, Counter(ready), learner) >= per_step
