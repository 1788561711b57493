from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.errors import InputError
from correction.token_advantages import (
    WhitenUnit,
    discounted_returns,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    shared_prefix_advantages,
    teacher_advantages,
    terminal_rewards,
)
from tests.correction.episodes import GARBAGE, make_episodes

MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
ZEROS = torch.zeros(3, 5, dtype=torch.float64)
GROUPS = torch.tensor([1, 1, 1])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def test_the_reward_stands_on_the_last_action_token() -> None:
    placed = terminal_rewards(torch.tensor([1.0, -2.0, 0.5]), MASK)

    assert placed.tolist() == [[0, 0, 0, 1, 0], [0, -2, 0, 0, 0], [0, 0, 0, 0, 0.5]]


def test_a_reward_without_an_action_token_is_refused() -> None:
    mask = MASK.clone()
    mask[1] = False
    with pytest.raises(InputError, match=r"mask: row 1 has no true, its reward -2.0 no place"):
        terminal_rewards(torch.tensor([1.0, -2.0, 0.5]), mask)

    padding = terminal_rewards(torch.tensor([1.0, 0.0, 0.5]), mask)
    assert padding[1].tolist() == [0.0] * 5


def test_16_bits_are_widened() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=torch.bfloat16)
    assert terminal_rewards(rewards, MASK).dtype == torch.float32
    assert discounted_returns(ZEROS.bfloat16(), MASK, gamma=0.9).dtype == torch.float32


@pytest.mark.parametrize("ddof", [0, 1])
@settings(deadline=None)
@given(seed=st.integers(0, 2**31))
def test_whitened_returns_have_mean_0_and_variance_1(ddof: int, seed: int) -> None:
    episodes = make_episodes(seed)

    white = reinforce_pp_advantages(
        episodes.rewards, episodes.mask, gamma=1.0, std_ddof=ddof, variance_epsilon=0.0
    )[episodes.mask]

    assert float(white.mean()) == pytest.approx(0.0, abs=1e-9)
    if len(white) > 1:
        assert float(white.var(correction=ddof)) == pytest.approx(1.0, rel=1e-9)


@both_dtypes
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, -0.7])
@pytest.mark.parametrize("ddof", [0, 1])
def test_returns_that_are_all_equal_give_exactly_zero(
    dtype: torch.dtype, reward: float, ddof: int
) -> None:
    rewards = terminal_rewards(torch.full((3,), reward, dtype=dtype), MASK)

    white = reinforce_pp_advantages(rewards, MASK, gamma=1.0, std_ddof=ddof, variance_epsilon=0.0)

    assert torch.equal(white, torch.zeros_like(white))


def test_one_action_token_alone_gives_zero_and_not_nan() -> None:
    one = torch.ones(1, 1)
    white = reinforce_pp_advantages(one, one.bool(), gamma=1.0, std_ddof=1)
    assert white.tolist() == [[0.0]]


def test_long_answers_shift_the_token_mean_and_not_the_mean_of_trajectories() -> None:
    """Two groups, {0, 1} and {1, 1}; the failure is three tokens long."""
    rewards = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1])
    mask = torch.arange(3)[None] < torch.tensor([3, 1, 1, 1])[:, None]

    def equal_group(unit: WhitenUnit, recenter: bool) -> list[float]:
        white = reinforce_pp_baseline_advantages(
            rewards, groups, mask, unit=unit, recenter=recenter, std_ddof=0
        )
        assert bool((white[~mask] == 0).all())
        return white[2:, 0].tolist()

    assert equal_group(WhitenUnit.TOKEN, False) == [0.0, 0.0]
    assert equal_group(WhitenUnit.TRAJECTORY, False) == [0.0, 0.0]
    assert equal_group(WhitenUnit.TRAJECTORY, True) == [0.0, 0.0]
    shifted = equal_group(WhitenUnit.TOKEN, True)
    assert shifted[0] == shifted[1] > 0.1


def test_rows_without_an_action_token_are_outside_the_statistics() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5], dtype=torch.float64)
    mask = torch.tensor([[True], [True], [False], [False]])

    for unit in WhitenUnit:
        white = reinforce_pp_baseline_advantages(
            rewards,
            torch.tensor([0, 0, 1, 1]),
            mask,
            unit=unit,
            recenter=True,
            std_ddof=0,
            variance_epsilon=0.0,
        )
        assert white[:, 0].tolist() == [-1.0, 1.0, 0.0, 0.0]


@settings(deadline=None)
@given(seed=st.integers(0, 2**31))
def test_teacher_advantages_sum_to_zero_in_each_trajectory(seed: int) -> None:
    episodes = make_episodes(seed)

    advantages = teacher_advantages(episodes.values, episodes.log_ratios, episodes.mask)

    assert advantages.sum(dim=1).tolist() == pytest.approx([0.0] * 3, abs=1e-12)
    gain = episodes.values - episodes.log_ratios
    for row, places in enumerate(episodes.mask):
        wanted = gain[row, places] - gain[row, places].mean()
        torch.testing.assert_close(advantages[row, places], wanted, rtol=1e-12, atol=1e-12)


@both_dtypes
def test_a_teacher_that_differs_by_a_constant_teaches_nothing(dtype: torch.dtype) -> None:
    """Also one action token alone: it is its own mean."""
    teacher = torch.full((3, 5), -0.1, dtype=dtype)
    anchor = torch.full((3, 5), -0.4, dtype=dtype)

    advantages = teacher_advantages(teacher, anchor, MASK)

    assert torch.equal(advantages, torch.zeros_like(advantages))


def test_a_trunk_has_the_mean_of_its_rows_and_a_branch_its_own() -> None:
    """Three rows: all share segment 4, the first two share 9 behind it; row 2 holds it masked."""
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 1, 0]]).bool()
    segments = torch.tensor([[4, 4, 9, -1], [4, 4, 9, -1], [4, 4, -1, 9]])
    advantages = torch.tensor([3.0, 0.0, -1.5])

    shared = shared_prefix_advantages(advantages, mask, segments)

    wanted = [[0.5, 0.0, 1.5, 3.0], [0.5, 0.0, 1.5, 0.0], [0.5, 0.0, -1.5, 0.0]]
    torch.testing.assert_close(shared.tolist(), wanted)


def test_a_row_counts_once_however_many_tokens_of_a_segment_it_holds() -> None:
    segments = torch.tensor([[7, 7, 7], [7, -1, -1]])

    shared = shared_prefix_advantages(
        torch.tensor([1.0, 0.0]), torch.ones(2, 3, dtype=torch.bool), segments
    )

    assert shared.tolist() == [[0.5, 0.5, 0.5], [0.5, 0.0, 0.0]]


def test_rows_that_share_nothing_keep_their_advantage_to_the_bit() -> None:
    advantages, mask = torch.tensor([0.1, 0.3]), torch.ones(2, 2, dtype=torch.bool)
    for segments in (torch.full((2, 2), -1), torch.tensor([[0, 1], [2, 3]])):
        shared = shared_prefix_advantages(advantages, mask, segments)
        assert torch.equal(shared, advantages[:, None].expand(2, 2))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_logprobs_and_segments_change_no_bit(garbage: float) -> None:
    episodes = make_episodes(1)
    hidden = ~episodes.mask
    clean = teacher_advantages(episodes.values, episodes.log_ratios, episodes.mask)

    dirty = teacher_advantages(
        episodes.values.masked_fill(hidden, garbage),
        episodes.log_ratios.masked_fill(hidden, -garbage),
        episodes.mask,
    )

    assert torch.equal(clean, dirty)
    segments, advantages = episodes.turns, episodes.bootstrap
    assert torch.equal(
        shared_prefix_advantages(advantages, episodes.mask, segments),
        shared_prefix_advantages(advantages, episodes.mask, segments.masked_fill(hidden, 777)),
    )


OfRewards: TypeAlias = Callable[[Tensor], Tensor]
TAKE_TOKEN_REWARDS: tuple[OfRewards, ...] = (
    lambda rewards: discounted_returns(rewards, MASK, gamma=1.0),
    lambda rewards: reinforce_pp_advantages(rewards, MASK, gamma=1.0, std_ddof=0),
)


@pytest.mark.parametrize("estimate", TAKE_TOKEN_REWARDS)
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 2), 1.0, r"token_rewards: must be 0 where the mask is false, got 1.0 at \[0, 2\]"),
        ((0, 2), math.nan, "token_rewards: must be 0 where the mask is false, got nan"),
        ((0, 3), math.nan, "token_rewards: 1 non-finite"),
    ],
)
def test_rewards_of_tokens(
    estimate: OfRewards, place: tuple[int, int], value: float, message: str
) -> None:
    rewards = ZEROS.clone()
    rewards[place] = value
    with pytest.raises(InputError, match=message):
        estimate(rewards)


BROKEN: dict[str, tuple[Callable[[], Tensor], str]] = {
    "gamma": (lambda: discounted_returns(ZEROS, MASK, gamma=1.5), r"gamma: expected a number in"),
    "ddof": (
        lambda: reinforce_pp_advantages(ZEROS, MASK, gamma=1.0, std_ddof=2),
        r"std_ddof: expected 0 \(population\) or 1 \(unbiased\), got 2",
    ),
    "epsilon": (
        lambda: reinforce_pp_advantages(ZEROS, MASK, gamma=1.0, std_ddof=0, variance_epsilon=-1e-8),
        "variance_epsilon: expected 0 or above",
    ),
    "token rewards": (
        lambda: discounted_returns(ZEROS[:2], MASK, gamma=1.0),
        r"token_rewards: expected shape \[3, 5\]",
    ),
    "no action token": (
        lambda: terminal_rewards(torch.zeros(3), MASK & False),
        "mask: no place is true",
    ),
    "rows": (
        lambda: terminal_rewards(torch.zeros(2), MASK),
        "mask: expected 2 rows, one a trajectory, got 3",
    ),
    "rows of groups": (
        lambda: reinforce_pp_baseline_advantages(
            torch.zeros(3), GROUPS, MASK[:2], unit=WhitenUnit.TOKEN, recenter=True, std_ddof=0
        ),
        "mask: expected 3 rows",
    ),
    "a lonely group": (
        lambda: reinforce_pp_baseline_advantages(
            torch.zeros(3),
            torch.tensor([1, 1, 2]),
            MASK,
            unit=WhitenUnit.TOKEN,
            recenter=True,
            std_ddof=0,
        ),
        "group_index: group 2 has one member",
    ),
    "teacher": (
        lambda: teacher_advantages(ZEROS / 0, ZEROS, MASK),
        "teacher_logprobs: 9 non-finite",
    ),
    "anchor": (
        lambda: teacher_advantages(ZEROS, ZEROS[0], MASK),
        r"anchor_logprobs: expected shape \[3, 5\], got \[5\]",
    ),
    "advantages": (
        lambda: shared_prefix_advantages(torch.tensor([0, 1, 2]), MASK, MASK.long()),
        "advantages: expected a floating-point dtype",
    ),
    "segments": (
        lambda: shared_prefix_advantages(torch.zeros(3), MASK, MASK.int()),
        "segment_ids: expected dtype torch.int64",
    ),
    "segment shape": (
        lambda: shared_prefix_advantages(torch.zeros(3), MASK, MASK.long()[:, :4]),
        r"segment_ids: expected shape \[3, 5\]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_arguments_are_refused_by_name(name: str) -> None:
    call, message = BROKEN[name]
    with pytest.raises(InputError, match=message):
        call()
