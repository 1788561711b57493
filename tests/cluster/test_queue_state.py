"""The queue's state machine: dedupe, bounds, leases, ledger; by example and by random walk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.admission import LagBudget
from actors.task_queue import PutOutcome
from actors.trajectory.record import DropReason
from cluster.trajectory_queue.ledger import check_closed
from cluster.trajectory_queue.records import GroupSummary, QueuePolicy
from cluster.trajectory_queue.state import QueueState
from correction.errors import RunError
from correction.versions import PolicyVersion

POLICY = QueuePolicy(
    run_id="r",
    budget=LagBudget(max_lag_versions=2, groups_per_step=2),
    group_size=4,
    max_groups=6,
    max_bytes=1000,
    lease_s=10.0,
)


class Clock:
    """A clock that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def started(policy: QueuePolicy = POLICY) -> tuple[QueueState, Clock]:
    clock = Clock()
    state = QueueState(policy, clock)
    state.resume()
    return state, clock


def summary(group_id: str, step: int = 0, survivors: int = 4, **extra: Any) -> GroupSummary:  # noqa: ANN401
    return replace(GroupSummary(group_id, 4, survivors, 10 * survivors, step), **extra)


def test_grants_stop_at_the_lag_bound_and_at_the_count_bound() -> None:
    state, _ = started(replace(POLICY, max_groups=100))
    assert len(state.grant("a", 0, 100)) == 6  # (N + 1) x B
    state, _ = started(replace(POLICY, max_groups=3))
    assert len(state.grant("a", 0, 100)) == 3
    assert state.grant("a", 0, 1) == []
    assert state.stats().refused == {"count": 1}


def test_a_group_is_accepted_once() -> None:
    state, _ = started()
    (grant,) = state.grant("a", 0, 1)
    assert state.put(summary(grant.group_id), b"x") is PutOutcome.ACCEPTED
    assert state.put(summary(grant.group_id), b"x") is PutOutcome.DUPLICATE
    assert state.put(summary("r/77"), b"x") is PutOutcome.DUPLICATE
    stats = state.stats()
    assert (stats.duplicates, stats.ready_groups, stats.trajectories.queued) == (2, 1, 4)


def test_bytes_are_counted_once_for_what_was_taken_in_whatever_becomes_of_it() -> None:
    state, _ = started(replace(POLICY, max_bytes=300))
    first, second, third = state.grant("a", 0, 3)
    assert state.put(summary(first.group_id, head_bytes=64), b"x" * 100) is PutOutcome.ACCEPTED
    assert state.put(summary(first.group_id, head_bytes=64), b"x" * 100) is PutOutcome.DUPLICATE
    small = summary(second.group_id, survivors=1, head_bytes=16)
    assert state.put(small, b"x" * 50) is PutOutcome.DROPPED
    assert state.put(summary(third.group_id), b"x" * 150) is PutOutcome.ACCEPTED
    (fourth,) = state.grant("a", 0, 1)
    assert state.put(summary(fourth.group_id, head_bytes=64), b"x" * 100) is PutOutcome.FULL
    stats = state.stats()
    assert (stats.received_bytes, stats.head_bytes, stats.queued_bytes) == (300, 80, 250)


def test_a_batch_is_leased_oldest_first_and_acked_once() -> None:
    state, _ = started()
    grants = state.grant("a", 0, 3)
    for grant, step in zip(grants, (1, 0, 0), strict=True):
        state.put(summary(grant.group_id, step), grant.group_id.encode())
    lease = state.lease()
    assert lease is not None
    assert lease.group_ids == (grants[1].group_id, grants[2].group_id)
    assert state.lease() is None  # one batch at a time
    assert state.ack(lease.lease_id, PolicyVersion(0, 1), 1)
    assert not state.ack(lease.lease_id, PolicyVersion(0, 1), 1)
    assert state.stats().trajectories.trained == 8


def test_an_expired_lease_returns_and_its_ack_counts_nothing() -> None:
    state, clock = started()
    for grant in state.grant("a", 0, 2):
        state.put(summary(grant.group_id), b"x")
    lease = state.lease()
    assert lease is not None
    clock.now = 11.0
    again = state.lease()
    assert again is not None
    assert again.group_ids == lease.group_ids
    assert not state.ack(lease.lease_id, PolicyVersion(0, 1), 1)
    assert state.stats().trajectories.trained == 0


def test_a_straggler_of_an_old_version_makes_the_learner_wait_for_it() -> None:
    state, _ = started(replace(POLICY, budget=LagBudget(0, 2)))
    first, second = state.grant("a", 0, 5)
    state.put(summary(first.group_id), b"x")
    assert state.lease() is None
    state.put(summary(second.group_id), b"x")
    assert state.lease() is not None


def test_too_old_data_is_dropped_by_name_at_put_and_at_lease() -> None:
    state, _ = started()
    one, two = state.grant("a", 0, 2)
    state.put(summary(one.group_id), b"x")
    state.learner_at(PolicyVersion(0, 3))
    assert state.put(summary(two.group_id), b"x") is PutOutcome.DROPPED
    assert state.lease() is None
    assert state.stats().trajectories.dropped == {"lag": 8}


def test_failed_members_and_small_groups_are_named() -> None:
    state, _ = started()
    one, two = state.grant("a", 0, 2)
    state.put(
        summary(
            one.group_id,
            survivors=2,
            failures={DropReason.ENVIRONMENT_TIMEOUT: 1},
            failed_tokens={DropReason.ENVIRONMENT_TIMEOUT: 3},
        ),
        b"x",
    )
    state.put(summary(two.group_id, survivors=1, failures={DropReason.ENVIRONMENT_ERROR: 3}), b"x")
    stats = state.stats()
    assert stats.trajectories.dropped == {
        "environment_timeout": 1,
        "engine_error": 1,
        "environment_error": 3,
        "group_too_small": 1,
    }
    assert stats.tokens.issued == 20 + 3 + 10
    assert stats.ready_groups == 1


def test_bytes_are_bounded_but_a_batch_is_always_let_in() -> None:
    state, _ = started()
    grants = state.grant("a", 0, 4)
    big = b"x" * 600
    assert state.put(summary(grants[0].group_id), big) is PutOutcome.ACCEPTED
    assert state.put(summary(grants[1].group_id), big) is PutOutcome.ACCEPTED  # batch of two
    assert state.put(summary(grants[2].group_id), big) is PutOutcome.FULL
    assert state.grant("a", 0, 1) == []
    lease = state.lease()
    assert lease is not None
    assert state.put(summary(grants[2].group_id), big) is PutOutcome.ACCEPTED


def test_an_actor_that_dies_gives_its_groups_back_by_name() -> None:
    state, _ = started()
    state.grant("a", 0, 2)
    (other,) = state.grant("b", 0, 1)
    assert state.actor_lost("a") == 2
    assert state.stats().trajectories.dropped == {"actor_lost": 8}
    assert state.put(summary(other.group_id), b"x") is PutOutcome.ACCEPTED


def test_the_tail_is_not_overshot_and_finish_names_the_rest() -> None:
    state, _ = started(replace(POLICY, total_steps=1))
    grants = state.grant("a", 0, 10)
    assert len(grants) == 2
    assert state.grant("a", 0, 1) == []
    state.put(summary(grants[0].group_id), b"x")
    state.finish()
    stats = state.stats()
    assert stats.trajectories.open == 0
    assert stats.trajectories.dropped == {"shutdown": 8}


def test_a_refused_step_is_made_up_for_by_another_batch() -> None:
    """Or the run would wait for ever for steps that no batch is left for."""
    state, _ = started(replace(POLICY, total_steps=1))
    for version in (PolicyVersion(0, 0), PolicyVersion(0, 1)):
        for grant in state.grant("a", 0, 9):
            state.put(summary(grant.group_id), b"x")
        lease = state.lease()
        assert lease is not None
        state.ack(lease.lease_id, version, version.step)
    assert state.grant("a", 0, 9) == []


def test_a_straggler_that_the_learner_waits_for_is_let_in_to_a_full_queue() -> None:
    state, _ = started(replace(POLICY, budget=LagBudget(1, 2), max_bytes=1000))
    grants = state.grant("a", 0, 4)
    for grant in grants[:2]:
        state.put(summary(grant.group_id), b"x")
    lease = state.lease()
    assert lease is not None
    state.ack(lease.lease_id, PolicyVersion(0, 1), 1)
    for grant in state.grant("a", 1, 2):
        state.put(summary(grant.group_id, step=1), b"x" * 500)
    assert state.lease() is None  # leaving the two of version 0 behind would break their bound
    for grant in grants[2:]:
        assert state.put(summary(grant.group_id), b"x" * 500) is PutOutcome.ACCEPTED
    lease = state.lease()
    assert lease is not None
    assert lease.group_ids == (grants[2].group_id, grants[3].group_id)


def test_a_lost_actor_is_granted_nothing_more_and_its_successor_is() -> None:
    state, _ = started()
    state.grant("actor.0", 0, 2)
    state.actor_lost("actor.0")
    assert state.grant("actor.0", 0, 2) == []  # sent before it died, arrived after
    assert state.stats().in_flight_groups == 0
    assert len(state.grant("actor.1", 0, 2)) == 2


def test_a_repeated_request_is_granted_once() -> None:
    state, _ = started()
    first = state.grant("a", 0, 2, "one")
    assert state.grant("a", 0, 2, "one") == first
    assert state.stats().in_flight_groups == 2
    assert state.grant("a", 0, 2, "two") != first


def test_no_pass_applied_means_not_trained() -> None:
    state, _ = started()
    for grant in state.grant("a", 0, 2):
        state.put(summary(grant.group_id), b"x")
    lease = state.lease()
    assert lease is not None
    state.ack(lease.lease_id, PolicyVersion(0, 0), 0)
    assert state.stats().trajectories.dropped == {"non_finite": 8}


def test_the_learner_never_moves_backward() -> None:
    state, _ = started()
    state.learner_at(PolicyVersion(0, 2))
    with pytest.raises(RunError, match="backward"):
        state.learner_at(PolicyVersion(0, 1))


def test_take_serves_consumers_that_are_no_learner() -> None:
    state, _ = started()
    for grant in state.grant("a", 0, 3):
        state.put(summary(grant.group_id), grant.group_id.encode())
    assert state.take(1) == (b"r/0",)
    assert state.take(5) == (b"r/1", b"r/2")
    assert state.take(1) == ()
    assert state.stats().trajectories.trained == 12


def test_a_ledger_that_does_not_close_stops_the_run() -> None:
    state, _ = started()
    state.grant("a", 0, 1)
    counts = state.stats().trajectories
    with pytest.raises(RunError, match="does not close"):
        check_closed(replace(counts, trained=1), "trajectories")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_histories_keep_ledger_bound_and_order(data: st.DataObject) -> None:
    passes = data.draw(st.integers(1, 2))
    budget = LagBudget(data.draw(st.integers(passes - 1, 3)), 2, passes)
    state, clock = started(replace(POLICY, budget=budget, max_groups=12))
    version, engine = PolicyVersion(0, 0), 0
    open_groups: dict[str, int] = {}
    lease = None
    acked: list[str] = []
    actions = ["grant", "put", "put", "lease", "ack", "swap", "die", "tick", "nack", "again"]
    for _ in range(80):
        action = data.draw(st.sampled_from(actions))
        if action == "grant":
            for grant in state.grant("a", engine, data.draw(st.integers(0, 5))):
                open_groups[grant.group_id] = engine
        elif action == "put" and open_groups:
            group_id = data.draw(st.sampled_from(sorted(open_groups)))
            step = open_groups[group_id]
            survivors = data.draw(st.integers(0, 4))
            size = data.draw(st.integers(1, 400))
            if state.put(summary(group_id, step, survivors), b"x" * size) is not PutOutcome.FULL:
                del open_groups[group_id]
        elif action == "again":
            assert state.put(summary("r/0" if "r/0" not in open_groups else "r/x"), b"") is (
                PutOutcome.DUPLICATE
            )
        elif action == "lease" and lease is None:
            lease = state.lease()
        elif action == "ack" and lease is not None:
            version = PolicyVersion(0, version.step + passes)
            if state.ack(lease.lease_id, version, passes):
                acked += lease.group_ids
            else:
                state.learner_at(version)
            lease = None
        elif action == "nack" and lease is not None:
            state.nack(lease.lease_id)
            lease = None
        elif action == "swap":
            engine = version.step
        elif action == "die":
            state.actor_lost("a")
            open_groups.clear()
        elif action == "tick":
            clock.now += 3.0
        state.stats()  # raises if the ledger does not close
    assert len(set(acked)) == len(acked)
    state.finish()
    assert state.stats().trajectories.open == 0
