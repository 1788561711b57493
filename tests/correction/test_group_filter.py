"""Dynamic sampling: which groups are kept, decided on the rewards themselves."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from correction.errors import InputError
from correction.group_filter import GroupFilter, GroupOutcome, group_outcome, keep_group
from tests.numerics.golden_vectors import VECTORS

REWARDS = st.floats(-1e6, 1e6)


def test_the_vector_of_dapo() -> None:
    vector = VECTORS["DAPO.dynamic"]
    for accuracy, keep in zip(vector["acc"], vector["keep"], strict=True):
        right = round(4 * accuracy)
        rewards = [1.0] * right + [0.0] * (4 - right)
        assert keep_group(rewards, GroupFilter.MIXED_REWARDS) is keep


@pytest.mark.parametrize("reward", [0.1, 0.3, -0.7, 1 / 3])
def test_equal_rewards_are_equal_whatever_their_mean_rounds_to(reward: float) -> None:
    assert sum([0.1] * 3) / 3 != 0.1  # the trap: a deviation of these is not 0
    for size in range(1, 12):
        assert not keep_group([reward] * size, GroupFilter.MIXED_REWARDS)


def test_the_smallest_difference_is_one() -> None:
    assert keep_group([0.1, 0.1, math.nextafter(0.1, 1)], GroupFilter.MIXED_REWARDS)
    assert not keep_group([0.0, -0.0], GroupFilter.MIXED_REWARDS)


@pytest.mark.parametrize(
    ("rewards", "outcome"),
    [
        ([1.0, 1.0], GroupOutcome.ALL_BEST),
        ([0.0, 0.0], GroupOutcome.ALL_WORST),
        ([-1.0, -1.0], GroupOutcome.ALL_WORST),
        ([0.5, 0.5], GroupOutcome.EQUAL),
        ([0.0, 1.0], GroupOutcome.MIXED),
        ([2.0, 3.0], GroupOutcome.MIXED),
    ],
)
def test_outcomes_have_names(rewards: list[float], outcome: GroupOutcome) -> None:
    assert group_outcome(rewards) is outcome


@given(st.lists(REWARDS, min_size=1, max_size=16), st.randoms())
def test_kept_exactly_where_two_rewards_differ_in_any_order(
    rewards: list[float], random: Random
) -> None:
    shuffled = list(rewards)
    random.shuffle(shuffled)
    differ = any(a != b for a in rewards for b in rewards)
    assert keep_group(rewards, GroupFilter.MIXED_REWARDS) is differ
    assert keep_group(shuffled, GroupFilter.MIXED_REWARDS) is differ
    assert keep_group(rewards, GroupFilter.NONE)


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan], [math.inf], [0.0, -math.inf]])
@pytest.mark.parametrize("rule", list(GroupFilter))
def test_what_is_no_group_of_rewards_is_refused(rewards: list[float], rule: GroupFilter) -> None:
    with pytest.raises(InputError, match="rewards"):
        keep_group(rewards, rule)
