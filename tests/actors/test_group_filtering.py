"""The group filter at the actor: groups whole or as their account, and accounts on the wire."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.group_filtering import account_of, filtered
from actors.trajectory.account import GroupAccount, GroupCosts, account_fields, read_account
from actors.trajectory.codec import encode_group
from actors.trajectory.record import DropReason, EndReason, TrajectoryGroup
from correction.errors import InputError, TrajectoryError
from correction.group_filter import GroupFilter, GroupOutcome
from tests.actors.example_groups import (
    accounts,
    decode,
    group_of,
    reason_of,
    trajectory,
    turn,
)

MIXED = GroupFilter.MIXED_REWARDS


def group_with(*rewards: float) -> TrajectoryGroup:
    return group_of(*(trajectory(member, reward=reward) for member, reward in enumerate(rewards)))


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=2, max_size=6))
def test_a_group_is_kept_whole_or_dropped_whole(rewards: list[float]) -> None:
    group = group_with(*rewards)
    assert filtered(group, GroupFilter.NONE) is group
    made = filtered(group, MIXED)
    if len(set(rewards)) > 1:
        assert made is group
        return
    assert made.trajectories == ()
    assert made.filtered == account_of(group)
    assert made.filtered.costs.tokens == group.action_tokens
    assert made.expected_size == group.expected_size


def test_a_group_too_small_to_judge_is_left_to_the_queue() -> None:
    for group in (group_with(1.0), group_of(failures={DropReason.OVERFLOW: 1}, expected_size=1)):
        assert filtered(group, MIXED) is group


def test_the_rule_looks_at_survivors_and_keeps_what_failed() -> None:
    group = group_of(
        *group_with(1.0, 1.0).trajectories,
        expected_size=3,
        failures={DropReason.ENVIRONMENT_TIMEOUT: 1},
        failed_tokens={DropReason.ENVIRONMENT_TIMEOUT: 4},
    )
    made = decode(encode_group(filtered(group, MIXED)), group)
    assert made.failures == group.failures
    assert made.failed_tokens == group.failed_tokens
    assert made.filtered is not None
    assert made.filtered.costs.trajectories == 2


def test_the_account_adds_up_what_the_survivors_cost() -> None:
    slow = turn(generation_s=2.0, environment_s=0.5)
    group = group_of(
        trajectory(0, turns=(slow, slow), end_reason=EndReason.MAX_TURNS, reward=0.25),
        trajectory(1, turns=(slow,), reward=0.25),
    )
    assert account_of(group) == GroupAccount(
        GroupOutcome.EQUAL,
        GroupCosts(
            groups=1,
            trajectories=2,
            truncated=1,
            tokens=9,
            reward_sum=0.5,
            generation_s=6.0,
            environment_s=1.5,
        ),
    )
    both = account_of(group).costs + account_of(group_with(1.0, 1.0)).costs
    assert (both.groups, both.trajectories, both.reward_mean) == (2, 4, 0.625)
    assert both.tokens_mean == (9 + 12) / 4
    assert GroupCosts().reward_mean is None
    assert GroupCosts().tokens_mean is None


def test_no_sum_of_rewards_overflows() -> None:
    assert math.isfinite(account_of(group_with(*[1.7e308] * 4)).costs.reward_sum)


def test_nobody_has_no_account() -> None:
    with pytest.raises(InputError, match="rewards"):
        account_of(group_of())


def test_a_filtered_group_is_small_on_the_wire() -> None:
    group = group_of(
        *(trajectory(member, turns=tuple(turn() for _ in range(4000))) for member in range(2))
    )
    assert len(encode_group(filtered(group, MIXED))) < len(encode_group(group)) / 50


@settings(deadline=None)
@given(accounts())
def test_an_account_comes_back_from_json(account: GroupAccount) -> None:
    assert read_account(json.loads(json.dumps(account_fields(account)))) == account


GOOD = account_fields(account_of(group_with(1.0, 1.0)))


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {},
        {"outcome": "all_best"},
        GOOD | {"more": 1},
        GOOD | {"outcome": "splendid"},
        GOOD | {"outcome": []},
        GOOD | {"groups": 2},
        GOOD | {"tokens": -1},
        GOOD | {"tokens": 1.0},
        GOOD | {"tokens": True},
        GOOD | {"tokens": 2**60},
        GOOD | {"truncated": 3},
        GOOD | {"reward_sum": math.nan},
        GOOD | {"reward_sum": "1"},
        GOOD | {"environment_s": -1.0},
        GOOD | {"generation_s": math.inf},
    ],
)
def test_what_is_no_account_is_refused(broken: object) -> None:
    with pytest.raises(TrajectoryError, match="bad_group"):
        read_account(broken)


def test_a_filtered_group_with_survivors_or_missing_members_is_refused() -> None:
    account = account_of(group_with(1.0, 1.0))
    survivors = group_of(trajectory(), expected_size=3, filtered=account)
    assert reason_of(encode_group(survivors)) == "bad_group"
    missing = group_of(expected_size=3, filtered=account)
    assert reason_of(encode_group(missing)) == "unaccounted_members"
