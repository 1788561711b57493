from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.errors import InputError
from correction.value_loss import ValueLosses, value_loss

MASK = torch.tensor([[True, True, False], [True, False, True]])
BROKEN = torch.where(torch.arange(6).view(2, 3) == 0, math.nan, 1.0)


def numbers(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Values with gradient, targets and old values [2, 3]."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 2, 3, generator=random, dtype=torch.float64)
    return values[0].to(dtype).requires_grad_(), values[1].to(dtype), values[2].to(dtype)


def evaluate(
    values: Tensor, targets: Tensor, old: Tensor | None, clip: float | None
) -> tuple[ValueLosses, Tensor]:
    result = value_loss(values, targets, MASK, old_values=old, clip=clip)
    (gradient,) = torch.autograd.grad(result.losses.sum(), values)
    return result, gradient


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_value_loss_passes_gradcheck(clip: float | None, seed: int) -> None:
    values, targets, old = numbers(seed)
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, targets, MASK, old_values=old, clip=clip).losses, (values,)
    )


@settings(max_examples=200, deadline=None)
@given(v=st.floats(-3, 3), r=st.floats(-3, 3), old=st.floats(-3, 3), clip=st.floats(0.01, 2))
def test_it_is_half_the_larger_of_both_squares(v: float, r: float, old: float, clip: float) -> None:
    values = torch.tensor([[v]], dtype=torch.float64, requires_grad=True)
    target, before = torch.full_like(values, r).detach(), torch.full_like(values, old).detach()
    one = torch.ones(1, 1, dtype=torch.bool)

    result = value_loss(values, target, one, old_values=before, clip=clip)
    (gradient,) = torch.autograd.grad(result.losses.sum(), values)

    held = min(max(v, old - clip), old + clip)
    plain, pessimistic = (v - r) * (v - r), (held - r) * (held - r)
    assert result.losses.item() == max(plain, pessimistic) / 2
    assert bool(result.clipped) == (pessimistic > plain)
    wanted = 0.0 if bool(result.clipped) else v - r
    assert gradient.item() == pytest.approx(wanted, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_before_the_first_step_both_sides_are_equal_and_the_gradient_is_whole(
    dtype: torch.dtype,
) -> None:
    """torch.max would give half of it to either side, and a rounding would take all of it."""
    for seed in range(50):
        values, targets, _ = numbers(seed, dtype)
        result, gradient = evaluate(values, targets, values.detach(), 0.2)
        assert torch.equal(gradient, (values.detach() - targets) * MASK)
        assert not result.clipped.any()


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    values, targets, old = numbers(1)
    result, gradient = evaluate(values, targets, None, None)
    torch.testing.assert_close(gradient, (values.detach() - targets) * MASK, rtol=1e-15, atol=0)
    assert torch.equal(result.losses, (values - targets).square() / 2 * MASK)
    assert torch.equal(evaluate(values, targets, old, None)[0].losses, result.losses)
    wide, _ = evaluate(values, targets, old, 1e9)
    assert torch.equal(wide.losses, result.losses)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masked_places_change_no_bit(garbage: float, dtype: torch.dtype) -> None:
    def outcome(filler: float) -> list[Tensor]:
        values, targets, old = (
            torch.where(MASK, each.detach(), filler) for each in numbers(2, dtype)
        )
        result, gradient = evaluate(values.requires_grad_(), targets, old, 0.2)
        return [result.losses, result.clipped, gradient]

    for left, right in zip(outcome(0.0), outcome(garbage), strict=True):
        assert torch.equal(left, right)
        assert not right.detach()[~MASK].any()


def test_no_gradient_reaches_the_targets_or_the_old_values() -> None:
    values, targets, old = (each.detach().requires_grad_() for each in numbers(3))
    loss = value_loss(values, targets, MASK, old_values=old, clip=0.2).losses.sum()
    gradients = torch.autograd.grad(loss, (values, targets, old), allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [True, False, False]


def test_bad_input_is_named() -> None:
    values, targets, old = numbers()
    with pytest.raises(InputError, match="old_values: missing, the value clip needs it"):
        value_loss(values, targets, MASK, old_values=None, clip=0.2)
    with pytest.raises(InputError, match=r"old_values: expected shape \[2, 3\], got \[2, 1\]"):
        value_loss(values, targets, MASK, old_values=old[:, :1], clip=0.2)
    with pytest.raises(InputError, match=r"value_targets: expected shape \[2, 3\], got \[2\]"):
        value_loss(values, targets[:, 0], MASK, old_values=None, clip=None)
    with pytest.raises(InputError, match="values: expected a floating-point dtype"):
        value_loss(values.long(), targets, MASK, old_values=None, clip=None)
    with pytest.raises(InputError, match=r"^values: 1 non-finite"):
        value_loss(BROKEN, targets, MASK, old_values=None, clip=None)
    with pytest.raises(InputError, match="value_targets: 1 non-finite"):
        value_loss(values, BROKEN, MASK, old_values=None, clip=None)
    with pytest.raises(InputError, match="old_values: 1 non-finite"):
        value_loss(values, targets, MASK, old_values=BROKEN, clip=0.2)
    with pytest.raises(InputError, match=r"clip: must be > 0 or None, got 0\.0"):
        value_loss(values, targets, MASK, old_values=old, clip=0.0)
    with pytest.raises(InputError, match="action_mask: no place is true"):
        value_loss(values, targets, torch.zeros_like(MASK), old_values=None, clip=None)
