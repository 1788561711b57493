from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.advantages import (
    dr_grpo_advantages,
    grpo_advantages,
    return_advantages,
    rloo_advantages,
)
from correction.errors import InputError

Estimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
GROUP_ESTIMATORS: tuple[Estimator, ...] = (rloo_advantages, dr_grpo_advantages, grpo_advantages)
group_estimator = pytest.mark.parametrize("estimate", GROUP_ESTIMATORS)
rewards_of_groups = st.lists(
    st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=6), min_size=1, max_size=4
)


def flat(groups: list[list[float]]) -> tuple[Tensor, Tensor]:
    rewards = [reward for group in groups for reward in group]
    index = [1000 * i - 7 for i, group in enumerate(groups) for _ in group]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(index)


def slow_rloo(groups: list[list[float]]) -> list[float]:
    """Each reward minus the mean of the others, from the definition."""
    out = []
    for group in groups:
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            out.append(reward - math.fsum(others) / len(others))
    return out


def slow_grpo(groups: list[list[float]], ddof: int, epsilon: float) -> list[float]:
    out = []
    for group in groups:
        mean = math.fsum(group) / len(group)
        spread = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (len(group) - ddof))
        constant = max(group) == min(group)
        out += [0.0 if constant else (r - mean) / (spread + epsilon) for r in group]
    return out


@settings(deadline=None)
@given(groups=rewards_of_groups)
def test_rloo_is_each_reward_minus_the_mean_of_the_others(groups: list[list[float]]) -> None:
    rewards, index = flat(groups)
    wanted = torch.tensor(slow_rloo(groups), dtype=torch.float64)
    torch.testing.assert_close(rloo_advantages(rewards, index), wanted, rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(groups=rewards_of_groups, ddof=st.sampled_from([0, 1]))
def test_grpo_equals_its_definition(groups: list[list[float]], ddof: int) -> None:
    rewards, index = flat(groups)
    wanted = torch.tensor(slow_grpo(groups, ddof, 1e-2), dtype=torch.float64)
    actual = grpo_advantages(rewards, index, std_ddof=ddof, std_epsilon=1e-2)
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(groups=rewards_of_groups)
def test_rloo_is_dr_grpo_times_g_over_g_minus_1(groups: list[list[float]]) -> None:
    rewards, index = flat(groups)
    sizes = torch.tensor([len(group) for group in groups for _ in group], dtype=torch.float64)
    scaled = dr_grpo_advantages(rewards, index) * sizes / (sizes - 1)
    torch.testing.assert_close(rloo_advantages(rewards, index), scaled, rtol=1e-12, atol=1e-12)


@group_estimator
@settings(deadline=None)
@given(groups=rewards_of_groups, seed=st.integers(0, 1000))
def test_groups_are_keyed_by_index_and_not_by_position(
    estimate: Estimator, groups: list[list[float]], seed: int
) -> None:
    rewards, index = flat(groups)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    shuffled = estimate(rewards[order], index[order])
    torch.testing.assert_close(shuffled, estimate(rewards, index)[order], rtol=1e-12, atol=1e-12)


@group_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(deadline=None)
@given(
    reward=st.one_of(
        st.sampled_from([0.1, 0.3, 0.7, 1e-30, 1e30, -0.1]), st.floats(-1e6, 1e6, width=32)
    ),
    size=st.integers(2, 17),
)
def test_a_degenerate_group_is_exactly_zero_for_any_reward(
    estimate: Estimator, dtype: torch.dtype, reward: float, size: int
) -> None:
    rewards = torch.full((size,), reward, dtype=dtype)
    advantages = estimate(rewards, torch.zeros(size, dtype=torch.int64))
    assert advantages.tolist() == [0.0] * size


def test_a_degenerate_group_is_zero_without_an_epsilon_and_beside_another_group() -> None:
    rewards = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1])
    index = torch.tensor([4, 9, 4, 9, 4])
    advantages = grpo_advantages(rewards, index, std_epsilon=0.0)
    assert advantages.tolist() == [0.0, 1.0, 0.0, -1.0, 0.0]


def test_statistics_of_float32_rewards_are_taken_in_float64() -> None:
    rewards = 10_000 + 0.01 * torch.tensor([0.0, 1.0, 5.0, 7.0, 8.0, 13.0, 29.0])
    assert rewards.dtype == torch.float32
    wanted = slow_grpo([rewards.double().tolist()], ddof=0, epsilon=1e-6)
    advantages = grpo_advantages(rewards, torch.zeros(7, dtype=torch.int64))
    assert advantages.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_a_spread_of_mere_rounding_is_not_blown_up() -> None:
    rewards = torch.tensor([0.3, 0.1 + 0.2], dtype=torch.float64)
    assert rewards[0] != rewards[1]
    advantages = grpo_advantages(rewards, torch.zeros(2, dtype=torch.int64))
    assert float(advantages.abs().max()) < 1e-9


@group_estimator
def test_a_group_of_one_is_refused_by_its_index(estimate: Estimator) -> None:
    with pytest.raises(InputError, match="group_index: group 8 has one member"):
        estimate(torch.ones(3), torch.tensor([5, 8, 5]))


def test_the_return_needs_no_group_and_is_a_copy() -> None:
    rewards = torch.tensor([0.5])
    advantages = return_advantages(rewards)
    advantages += 1
    assert rewards.tolist() == [0.5]


@group_estimator
@pytest.mark.parametrize(
    ("rewards", "index", "message"),
    [
        (torch.tensor([1.0, math.nan]), torch.zeros(2, dtype=torch.int64), "rewards: 1 non-finite"),
        (torch.tensor([1.0, math.inf]), torch.zeros(2, dtype=torch.int64), "rewards: 1 non-finite"),
        (torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64), "rewards: expected a floating"),
        (torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64), r"rewards: expected shape \[N\]"),
        (torch.ones(0), torch.zeros(0, dtype=torch.int64), "N >= 1"),
        (torch.ones(2), torch.zeros(3, dtype=torch.int64), r"group_index: expected shape \[2\]"),
        (torch.ones(2), torch.zeros(2), "group_index: expected dtype torch.int64"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    estimate: Estimator, rewards: Tensor, index: Tensor, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        estimate(rewards, index)


def test_std_ddof_is_population_or_unbiased() -> None:
    with pytest.raises(InputError, match="std_ddof"):
        grpo_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), std_ddof=2)
