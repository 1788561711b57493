from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.errors import InputError
from correction.group_ratio import group_log_ratio, log_group_expectation

any_seed = st.integers(0, 2**31)


@dataclass(frozen=True)
class GroupBatch:
    """Rows of whole groups; the last row is padding."""

    target: Tensor
    behaviour: Tensor
    mask: Tensor
    group: Tensor


def make_groups(seed: int, columns: int = 5) -> GroupBatch:
    """Groups of 2, 3 and 2, shuffled, and a padding row with the index of a group."""
    random = torch.Generator().manual_seed(seed)
    group = torch.tensor([7, 7, -2, -2, -2, 40, 40])[torch.randperm(7, generator=random)]
    shape = (8, columns)
    mask = torch.rand(*shape, generator=random) < 0.6
    mask[:, 0], mask[7] = True, False
    logprobs = -torch.randn(2, *shape, generator=random, dtype=torch.float64).abs()
    return GroupBatch(logprobs[0], logprobs[1], mask, torch.cat([group, torch.tensor([7])]))


def ratios_of(batch: GroupBatch) -> tuple[Tensor, Tensor]:
    expectation = log_group_expectation(batch.behaviour, batch.mask, batch.group)
    return expectation, group_log_ratio(batch.target, batch.mask, expectation)


def mean_of(logprobs: Tensor, mask: Tensor) -> float:
    values = logprobs[mask].tolist()
    return math.fsum(values) / len(values)


@settings(max_examples=80, deadline=None)
@given(seed=any_seed, columns=st.integers(1, 9))
def test_it_is_its_slow_truth(seed: int, columns: int) -> None:
    batch = make_groups(seed, columns)
    q = [math.exp(mean_of(batch.behaviour[i], batch.mask[i])) for i in range(7)]
    expectation, logs = ratios_of(batch)

    for i in range(7):
        siblings = [k for k in range(7) if batch.group[k] == batch.group[i]]
        e = math.fsum(q[k] ** 2 for k in siblings) / math.fsum(q[k] for k in siblings)
        w = math.exp(mean_of(batch.target[i], batch.mask[i])) / e
        assert float(expectation[i].exp()) == pytest.approx(e, rel=1e-12)
        assert logs[i].exp()[batch.mask[i]].tolist() == pytest.approx(
            [w] * int(batch.mask[i].sum()), rel=1e-12
        )
    assert float(expectation[7]) == 0.0
    assert not logs[~batch.mask].any()


@settings(max_examples=40, deadline=None)
@given(seed=any_seed, order=st.permutations(range(8)), columns=st.integers(0, 3))
def test_order_and_padding_change_nothing(seed: int, order: list[int], columns: int) -> None:
    batch, index = make_groups(seed), torch.tensor(order)
    pad = torch.nn.functional.pad
    moved = GroupBatch(
        pad(batch.target[index], (columns, columns)),
        pad(batch.behaviour[index], (columns, columns)),
        pad(batch.mask[index], (columns, columns)),
        batch.group[index],
    )
    expectation, logs = ratios_of(batch)
    moved_expectation, moved_logs = ratios_of(moved)
    torch.testing.assert_close(moved_expectation, expectation[index], rtol=1e-12, atol=1e-12)
    inner = moved_logs[:, columns : columns + 5]
    torch.testing.assert_close(inner, logs[index], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
def test_garbage_at_masked_places_changes_no_bit(garbage: float) -> None:
    batch = make_groups(1)
    dirty = GroupBatch(
        torch.where(batch.mask, batch.target, garbage),
        torch.where(batch.mask, batch.behaviour, garbage),
        batch.mask,
        batch.group,
    )
    expectation, logs = ratios_of(batch)
    dirty_expectation, dirty_logs = ratios_of(dirty)
    assert torch.equal(expectation, dirty_expectation)
    assert torch.equal(logs, dirty_logs)
    at_padding = dirty_expectation.clone()
    at_padding[7] = garbage
    assert torch.equal(group_log_ratio(batch.target, batch.mask, at_padding), logs)


@settings(max_examples=40, deadline=None)
@given(seed=any_seed)
def test_equally_likely_members_have_the_geometric_ratio(seed: int) -> None:
    """On policy that is 1; members that are not equally likely have q over its expectation."""
    batch = make_groups(seed)
    flat = torch.full_like(batch.behaviour, -0.7)
    expectation = log_group_expectation(flat, batch.mask, batch.group)
    torch.testing.assert_close(
        group_log_ratio(flat, batch.mask, expectation), torch.zeros_like(flat), rtol=0, atol=1e-12
    )
    on_policy = GroupBatch(batch.behaviour, batch.behaviour, batch.mask, batch.group)
    assert float(ratios_of(on_policy)[1].abs().max()) > 1e-6


@settings(max_examples=40, deadline=None)
@given(seed=any_seed)
def test_the_expectation_lies_between_the_members(seed: int) -> None:
    batch = make_groups(seed)
    means = torch.tensor([mean_of(batch.behaviour[i], batch.mask[i]) for i in range(7)])
    expectation = log_group_expectation(batch.behaviour, batch.mask, batch.group)
    for i in range(7):
        siblings = means[batch.group[:7] == batch.group[i]]
        assert siblings.min() - 1e-6 <= expectation[i] <= siblings.max() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_probabilities_too_small_for_their_dtype_are_no_problem(dtype: torch.dtype) -> None:
    behaviour = torch.tensor([[-2000.0], [-2001.0], [0.0]], dtype=dtype)
    mask, group = torch.tensor([[True], [True], [False]]), torch.zeros(3, dtype=torch.int64)

    expectation = log_group_expectation(behaviour, mask, group)

    wanted = -2000 + math.log((1 + math.exp(-2)) / (1 + math.exp(-1)))
    assert expectation.dtype == dtype
    assert expectation.tolist() == pytest.approx([wanted, wanted, 0.0], rel=1e-7)


def test_each_token_receives_its_share_of_the_gradient_and_the_expectation_none() -> None:
    batch = make_groups(3)
    target = batch.target.clone().requires_grad_()
    behaviour = batch.behaviour.clone().requires_grad_()
    expectation = log_group_expectation(behaviour, batch.mask, batch.group)
    assert not expectation.requires_grad

    expectation.requires_grad_()
    logs = group_log_ratio(target, batch.mask, expectation)
    (gradient,) = torch.autograd.grad(logs.sum(), target, retain_graph=True)
    (of_expectation,) = torch.autograd.grad(logs.sum(), expectation, allow_unused=True)
    assert of_expectation is None

    # n tokens carry the mean of n: 1 each.
    torch.testing.assert_close(gradient, batch.mask.double())
    assert torch.autograd.gradcheck(
        lambda moved: group_log_ratio(moved, batch.mask, expectation), (target,)
    )


def test_a_group_of_one_is_refused_and_a_padding_row_is_no_member() -> None:
    behaviour, group = torch.full((3, 2), -1.0), torch.tensor([4, 9, 9])
    mask = torch.tensor([[True, True], [True, False], [False, True]])
    with pytest.raises(InputError, match="group_index: group 4 has one member"):
        log_group_expectation(behaviour, mask, group)
    mask[0] = False
    assert log_group_expectation(behaviour, mask, group).tolist() == [0.0, -1.0, -1.0]
    mask[1] = False
    with pytest.raises(InputError, match="group_index: group 9 has one member"):
        log_group_expectation(behaviour, mask, group)


def test_bad_input_is_refused() -> None:
    batch = make_groups(4)
    expectation = log_group_expectation(batch.behaviour, batch.mask, batch.group)
    broken = batch.behaviour.clone()
    broken[0, 0] = math.nan
    for message, arguments in {
        "behaviour_logprobs: 1 non-finite": (broken, batch.mask, batch.group),
        "behaviour_logprobs: a logprob must be <= 0": (
            batch.behaviour.exp(),
            batch.mask,
            batch.group,
        ),
        "group_index: expected shape": (batch.behaviour, batch.mask, batch.group[1:]),
        "group_index: expected dtype": (batch.behaviour, batch.mask, batch.group.double()),
        "action_mask: no place": (batch.behaviour, torch.zeros_like(batch.mask), batch.group),
    }.items():
        with pytest.raises(InputError, match=message):
            log_group_expectation(*arguments)
    lost = expectation.clone()
    lost[0] = math.nan
    for message, values in {
        "log_expectation: 1 non-finite": lost,
        "log_expectation: expected shape": expectation[1:],
        "log_expectation: expected a floating": torch.zeros(8, dtype=torch.int64),
    }.items():
        with pytest.raises(InputError, match=message):
            group_log_ratio(batch.target, batch.mask, values)
    with pytest.raises(InputError, match="target_logprobs: 1 non-finite"):
        group_log_ratio(broken, batch.mask, expectation)
