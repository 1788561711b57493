"""Groups, and what every estimator owes a group of equal rewards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.advantages import baseline_advantages
from correction.errors import InputError
from correction.group_statistics import (
    centre,
    find_groups,
    group_deviation,
    group_is_constant,
    group_sum,
)
from correction.optimal_baseline import opob_advantages
from correction.tail_advantages import tail_advantages
from correction.token_advantages import WhitenUnit, reinforce_pp_baseline_advantages

Estimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
INDEX = torch.tensor([8, -2, 8, -2, 8])


def opob(rewards: Tensor, index: Tensor) -> Tensor:
    shares = torch.arange(1, len(rewards) + 1, dtype=torch.float64)
    return opob_advantages(rewards, index, shares.sqrt(), shares)


def opob_without_a_pull(rewards: Tensor, index: Tensor) -> Tensor:
    return opob_advantages(rewards, index, torch.zeros_like(rewards), torch.ones_like(rewards))


def scaled(rewards: Tensor, index: Tensor) -> Tensor:
    mask = torch.ones(len(rewards), 2, dtype=torch.bool)
    return reinforce_pp_baseline_advantages(
        rewards, index, mask, unit=WhitenUnit.TRAJECTORY, recenter=False, std_ddof=1
    )[:, 0]


ESTIMATORS: tuple[Estimator, ...] = (tail_advantages, opob, opob_without_a_pull, scaled)
every_estimator = pytest.mark.parametrize("estimate", ESTIMATORS)


def test_statistics_are_keyed_by_index() -> None:
    values = torch.tensor([1.0, 10, 2, 30, 6], dtype=torch.float64)
    groups = find_groups(INDEX)

    assert group_sum(values, groups).tolist() == [9, 40, 9, 40, 9]
    assert groups.size.tolist() == [3, 2, 3, 2, 3]
    assert centre(values, groups).tolist() == [-2, -10, -1, 10, 3]
    assert group_is_constant(values, groups).tolist() == [False] * 5
    assert group_deviation(centre(values, groups), groups, 0)[1] == 10
    assert float(group_deviation(centre(values, groups), groups, 1)[0]) == pytest.approx(7**0.5)


@every_estimator
@both_dtypes
@settings(deadline=None)
@given(
    reward=st.one_of(
        st.sampled_from([0.1, 0.3, 0.7, 1e-30, 1e30, -0.1]), st.floats(-1e6, 1e6, width=32)
    ),
    size=st.integers(2, 17),
    other=st.floats(-5, 5, width=32),
)
def test_a_degenerate_group_is_exactly_zero_beside_any_other(
    estimate: Estimator, dtype: torch.dtype, reward: float, size: int, other: float
) -> None:
    rewards = torch.tensor([reward] * size + [other, 1.0], dtype=dtype)
    index = torch.tensor([3] * size + [1, 1])

    assert estimate(rewards, index)[:size].tolist() == [0.0] * size


@every_estimator
@pytest.mark.parametrize(
    ("rewards", "index", "message"),
    [
        (torch.tensor([1.0, math.nan]), torch.zeros(2, dtype=torch.int64), "rewards: 1 non-finite"),
        (torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64), "rewards: expected a floating"),
        (torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64), r"rewards: expected shape \[N\]"),
        (torch.ones(0), torch.zeros(0, dtype=torch.int64), "N >= 1"),
        (torch.ones(2), torch.zeros(3, dtype=torch.int64), r"group_index: expected shape \[2\]"),
        (torch.ones(2), torch.zeros(2), "group_index: expected dtype torch.int64"),
        (torch.ones(3), torch.tensor([5, 8, 5]), "group_index: group 8 has one member"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    estimate: Estimator, rewards: Tensor, index: Tensor, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        estimate(rewards, index)


def test_a_constant_baseline_needs_no_group_and_is_exact() -> None:
    assert baseline_advantages(torch.tensor([0.1, 1.0]), baseline=0.1).tolist() == [
        0.0,
        float(torch.tensor(1.0) - torch.tensor(0.1)),
    ]
    assert baseline_advantages(torch.tensor([2.0]), baseline=0.5).tolist() == [1.5]
    for baseline in (math.nan, math.inf):
        with pytest.raises(InputError, match="baseline: expected finite"):
            baseline_advantages(torch.ones(1), baseline=baseline)


def test_a_group_that_nothing_pulls_gets_the_plain_mean() -> None:
    rewards = torch.tensor([0.0, 1.0, 5.0, 3.0])
    index = torch.tensor([0, 0, 1, 1])
    weights = torch.tensor([0.0, 0.0, 0.0, 2.0])

    advantages = opob_advantages(rewards, index, weights, torch.ones(4))

    assert advantages.tolist() == [-0.5, 0.5, 2.0, 0.0]


@pytest.mark.parametrize("name", ["weights", "squared_norms"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([1.0, -0.5]), "must be >= 0, got -0.5"),
        (torch.tensor([1.0, math.inf]), "1 non-finite"),
        (torch.tensor([1, 1]), "expected a floating-point dtype"),
        (torch.ones(3), r"expected shape \[2\]"),
    ],
)
def test_weights_and_norms_of_the_optimal_baseline(name: str, values: Tensor, message: str) -> None:
    shares = {"weights": torch.ones(2), "squared_norms": torch.ones(2), name: values}
    with pytest.raises(InputError, match=f"{name}: {message}"):
        opob_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), **shares)
