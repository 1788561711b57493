from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.advantages import rloo_advantages
from correction.errors import InputError
from correction.tail_advantages import maxrl_advantages, tail_advantages

any_group = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12)
binary_group = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=12)


def one_group(rewards: list[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64)


def assert_equal(actual: Tensor, wanted: Tensor) -> None:
    size = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12 * size)


@settings(deadline=None)
@given(rewards=any_group)
def test_they_sum_to_zero(rewards: list[float]) -> None:
    advantages = tail_advantages(*one_group(rewards))
    size = max(1.0, float(advantages.abs().max()))
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-12 * size)


@settings(deadline=None)
@given(rewards=any_group, shift=st.floats(-10, 10), scale=st.floats(0, 10))
def test_they_do_not_move_with_a_shift_and_scale_with_the_rewards(
    rewards: list[float], shift: float, scale: float
) -> None:
    values, group = one_group(rewards)
    advantages = tail_advantages(values, group)

    torch.testing.assert_close(
        tail_advantages(values + shift, group), advantages, rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(
        tail_advantages(scale * values, group), scale * advantages, rtol=1e-10, atol=1e-10
    )


@settings(deadline=None)
@given(rewards=any_group, copies=st.integers(2, 4))
def test_ties_are_equal_to_the_bit_and_order_is_kept(rewards: list[float], copies: int) -> None:
    values, group = one_group(rewards * copies)

    advantages = tail_advantages(values, group)

    by_copy = advantages.view(copies, -1)
    assert bool((by_copy == by_copy[0]).all())
    ranks = values.argsort()
    assert bool((advantages[ranks].diff() >= 0).all())


@settings(deadline=None)
@given(rewards=binary_group)
def test_binary_rewards_give_maxrl(rewards: list[float]) -> None:
    group = one_group(rewards)
    assert_equal(tail_advantages(*group), maxrl_advantages(*group))


@settings(deadline=None)
@given(first=st.floats(-10, 10), second=st.floats(-10, 10))
def test_two_members_give_rloo(first: float, second: float) -> None:
    pair = one_group([first, second])
    assert_equal(tail_advantages(*pair), rloo_advantages(*pair))


def test_a_group_of_large_rewards_does_not_round_the_others() -> None:
    rewards = torch.tensor([1e15, 0.0, -1e15, 0.5, 0.25], dtype=torch.float64)
    index = torch.tensor([1, 2, 1, 2, 2])

    advantages = tail_advantages(rewards, index)

    alone = tail_advantages(rewards[[1, 3, 4]], torch.zeros(3, dtype=torch.int64))
    assert torch.equal(advantages[[1, 3, 4]], alone)


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ([0.0, 0.0, 1.0, 0.0], [-1.0, -1.0, 3.0, -1.0]),
        ([1.0, 1.0, 0.0], [0.5, 0.5, -1.0]),
    ],
)
def test_maxrl(rewards: list[float], wanted: list[float]) -> None:
    assert maxrl_advantages(*one_group(rewards)).tolist() == wanted


def test_maxrl_takes_each_group_by_itself() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0])
    index = torch.tensor([4, 7, 4, 7, 4])

    assert maxrl_advantages(rewards, index).tolist() == [0.5, 0.0, -1.0, 0.0, 0.5]


def test_maxrl_refuses_rewards_between() -> None:
    with pytest.raises(InputError, match="rewards: maxrl needs rewards of 0 or 1"):
        maxrl_advantages(*one_group([0.0, 0.5]))


def test_the_dtype_is_that_of_the_rewards() -> None:
    rewards, index = torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.int64)
    assert tail_advantages(rewards, index).dtype == torch.float32
    assert maxrl_advantages(rewards, index).dtype == torch.float32
