"""Dynamic sampling in the queue's state machine: accounts, refill, lag, and when to stop."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.admission import LagBudget
from actors.task_queue import PutOutcome
from actors.trajectory.account import GroupAccount, GroupCosts
from cluster import assembly
from cluster.config import parse_config
from cluster.trajectory_queue.filtering import FilterAccount
from cluster.trajectory_queue.records import GroupSummary, Lease, QueuePolicy
from cluster.trajectory_queue.state import QueueState
from correction.group_filter import GroupFilter, GroupOutcome
from correction.versions import PolicyVersion

POLICY = QueuePolicy(
    run_id="r",
    budget=LagBudget(max_lag_versions=2, groups_per_step=2),
    group_size=4,
    max_groups=6,
    max_bytes=1000,
    lease_s=10.0,
)
REWARDS = {
    GroupOutcome.MIXED: 2.0,
    GroupOutcome.ALL_BEST: 4.0,
    GroupOutcome.ALL_WORST: 0.0,
    GroupOutcome.EQUAL: 1.0,
}


def started(policy: QueuePolicy = POLICY) -> QueueState:
    state = QueueState(policy, lambda: 0.0)
    state.resume()
    return state


def account(outcome: GroupOutcome, tokens: int = 40) -> GroupAccount:
    return GroupAccount(outcome, GroupCosts(1, 4, 1, tokens, REWARDS[outcome], 2.0, 0.5))


def finished(group_id: str, outcome: GroupOutcome, step: int = 0) -> GroupSummary:
    """A group with these rewards, dropped unless they are mixed."""
    filtered = outcome is not GroupOutcome.MIXED
    return GroupSummary(
        group_id, 4, 4, 40, 0 if filtered else step, account=account(outcome), filtered=filtered
    )


def test_a_filtered_group_is_dropped_by_name_with_its_tokens_and_seconds() -> None:
    state = started()
    outcomes = (GroupOutcome.ALL_WORST, GroupOutcome.MIXED, GroupOutcome.ALL_BEST)
    for grant, outcome in zip(state.grant("a", 0, 3), outcomes, strict=True):
        put = state.put(finished(grant.group_id, outcome), b"x")
        mixed = outcome is GroupOutcome.MIXED
        assert put is (PutOutcome.ACCEPTED if mixed else PutOutcome.DROPPED)
    stats = state.stats()
    assert stats.trajectories.dropped == {"filtered": 8}
    assert stats.tokens.dropped == {"filtered": 80}
    assert (stats.tokens.issued, stats.tokens.queued) == (120, 40)
    assert stats.kept == {"mixed": account(GroupOutcome.MIXED).costs}
    assert stats.filtered == {
        outcome.value: account(outcome).costs
        for outcome in (GroupOutcome.ALL_WORST, GroupOutcome.ALL_BEST)
    }


def test_its_room_is_free_at_once() -> None:
    state = started()
    grants = state.grant("a", 0, 100)
    assert state.grant("a", 0, 1) == []
    state.put(finished(grants[0].group_id, GroupOutcome.ALL_BEST), b"x")
    (fresh,) = state.grant("a", 0, 100)
    assert fresh.task_index == len(grants)  # another task, not the same one again


def test_a_filtered_group_is_taken_in_by_a_full_queue_and_once() -> None:
    state = started()
    grants = state.grant("a", 0, 4)
    for grant in grants[:2]:
        state.put(finished(grant.group_id, GroupOutcome.MIXED), b"x" * 600)
    mixed = finished(grants[2].group_id, GroupOutcome.MIXED)
    equal = finished(grants[2].group_id, GroupOutcome.EQUAL)
    assert state.put(mixed, b"x") is PutOutcome.FULL
    assert state.put(equal, b"x") is PutOutcome.DROPPED
    assert state.put(equal, b"x") is PutOutcome.DUPLICATE
    assert state.stats().filtered["equal"].groups == 1


def test_a_full_queue_still_admits_what_a_batch_lacks() -> None:
    state = started()
    first, second = state.grant("a", 0, 2)
    state.put(finished(first.group_id, GroupOutcome.MIXED), b"x" * 5000)
    state.put(finished(second.group_id, GroupOutcome.ALL_BEST), b"x")
    (third,) = state.grant("a", 0, 10)
    assert state.put(finished(third.group_id, GroupOutcome.MIXED), b"x") is PutOutcome.ACCEPTED
    assert state.lease() is not None


def test_the_tail_is_refilled_until_the_last_batch_is_whole() -> None:
    state = started(replace(POLICY, total_steps=1))
    for _ in range(5):
        first, second = state.grant("a", 0, 10)
        for grant in (first, second):
            state.put(finished(grant.group_id, GroupOutcome.ALL_WORST), b"x")
    for grant in state.grant("a", 0, 10):
        state.put(finished(grant.group_id, GroupOutcome.MIXED), b"x")
    lease = state.lease()
    assert lease is not None
    assert state.ack(lease.lease_id, PolicyVersion(0, 1), 1)
    assert state.grant("a", 1, 10) == []


@pytest.mark.parametrize(
    ("outcome", "reward", "verdict"),
    [
        (GroupOutcome.ALL_WORST, "0", "too hard"),
        (GroupOutcome.ALL_BEST, "1", "too easy"),
        (GroupOutcome.EQUAL, "0.25", "too easy or too hard"),
    ],
)
def test_a_run_that_filters_everything_gets_a_cause_to_stop(
    outcome: GroupOutcome, reward: str, verdict: str
) -> None:
    state = started(replace(POLICY, max_filtered_in_a_row=7))
    for count in range(1, 8):
        assert state.stats().stop_cause is None
        (grant,) = state.grant("a", 0, 1)
        state.put(finished(grant.group_id, outcome), b"x")
        assert (state.stats().stop_cause is not None) == (count == 7)
    cause = state.stats().stop_cause
    assert cause is not None
    assert f"7 {outcome}; mean reward {reward})" in cause
    assert verdict in cause
    assert state.grant("a", 0, 1) == []


@pytest.mark.parametrize("rule", list(GroupFilter))
def test_the_rule_of_the_recipe_and_the_limit_reach_actors_and_queue(rule: GroupFilter) -> None:
    config = parse_config(
        {
            "correction": {"overrides": {"group_filter": rule.value}},
            "rollout": {"max_filtered_in_a_row": 9},
        }
    )
    settings = assembly.actor_settings(config, "run", Path("model"), "actor-0.0", seed=1)
    assert settings.group_filter is rule
    assert assembly.queue_policy(config, "run").max_filtered_in_a_row == 9


def test_a_kept_group_begins_the_row_again_and_0_never_stops() -> None:
    endless, bounded = FilterAccount(), FilterAccount(most_in_a_row=3)
    for _ in range(100):
        for groups in (endless, bounded):
            groups.drop(account(GroupOutcome.ALL_BEST))
            groups.drop(account(GroupOutcome.ALL_WORST))
            groups.keep(account(GroupOutcome.MIXED))
    assert bounded.stop_cause is None
    for _ in range(1000):
        endless.drop(account(GroupOutcome.ALL_BEST))
    assert endless.stop_cause is None


def test_a_cause_to_stop_stays() -> None:
    groups = FilterAccount(most_in_a_row=2)
    groups.drop(account(GroupOutcome.ALL_BEST))
    groups.drop(account(GroupOutcome.ALL_WORST))
    groups.keep(account(GroupOutcome.MIXED))
    assert groups.stop_cause is not None
    assert (
        "last 2 had equal rewards (1 all_best, 1 all_worst; mean reward 0.5)" in groups.stop_cause
    )


@dataclass
class Simulation:
    """Actors, learner and broadcasts around the queue, in a random but fair order.

    Groups end in any order; broadcasts come late; each finished group is filtered with the
    probability `share`.
    """

    state: QueueState
    share: float
    random: random.Random
    engine: int = 0
    version: int = 0
    running: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)
    filtered: int = 0

    def fill(self) -> None:
        for grant in self.state.grant("a", self.engine, self.random.randint(0, 5)):
            self.running[grant.group_id] = self.engine

    def finish_one(self) -> None:
        if not self.running:
            return
        group_id = self.random.choice(sorted(self.running))
        step = self.running.pop(group_id)
        drop = self.random.random() < self.share
        outcome = GroupOutcome.ALL_WORST if drop else GroupOutcome.MIXED
        put = self.state.put(finished(group_id, outcome, step), b"x")
        assert put is (PutOutcome.DROPPED if drop else PutOutcome.ACCEPTED)  # never for its lag
        self.steps[group_id] = step
        self.filtered += drop

    def train(self) -> None:
        lease = self.state.lease()
        if lease is None:
            return
        passes = self.state.policy.budget.steps_per_batch
        self.lags += [
            self.version + done - self.steps[group_id]
            for group_id in lease.group_ids
            for done in range(passes)
        ]
        self.take_steps(lease, passes)

    def take_steps(self, lease: Lease, passes: int) -> None:
        for _ in range(self.random.randint(0, 6)):  # the actors go on while the learner trains
            self.random.choice([self.fill, self.finish_one])()
        self.version += passes
        assert self.state.ack(lease.lease_id, PolicyVersion(0, self.version), passes)

    def swap(self) -> None:
        self.engine = self.version


@settings(max_examples=150, deadline=None)
@given(
    share=st.floats(0, 0.95),
    max_lag=st.integers(0, 4),
    passes=st.integers(1, 3),
    groups_per_step=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_filtering_neither_starves_the_learner_nor_breaks_the_bound(
    share: float, max_lag: int, passes: int, groups_per_step: int, seed: int
) -> None:
    passes = min(passes, max_lag + 1)
    budget = LagBudget(max_lag, groups_per_step, passes)
    policy = replace(
        POLICY, budget=budget, max_groups=groups_per_step * (max_lag + 1), total_steps=12
    )
    run = Simulation(started(policy), share, random.Random(seed))
    recent: deque[int] = deque(maxlen=3000)
    while run.version < 12:
        run.random.choice([run.fill, run.fill, run.finish_one, run.train, run.swap])()
        stats = run.state.stats()  # raises if the ledger does not close
        recent.append(run.version)
        assert len(set(recent)) > 1 or len(recent) < 3000, "no step in 3000 events"
    assert max(run.lags) <= max_lag
    batches = -(-12 // passes)
    assert len(run.lags) == batches * groups_per_step * passes  # every batch was whole
    run.state.finish()
    stats = run.state.stats()
    assert stats.trajectories.open == 0
    assert stats.trajectories.dropped.get("filtered", 0) == 4 * run.filtered
    assert stats.trajectories.trained == 4 * batches * groups_per_step
    assert "lag" not in stats.trajectories.dropped
