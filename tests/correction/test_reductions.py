"""Masked reductions, ratio levels and bounds: values and gradients beside garbage."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from correction.bounds import SIGNED_BOUNDS, Bound, bound_weight
from correction.masks import fill_masked, masked_mean, masked_sum, turn_count, turn_sum
from correction.ratios import MAX_LOG_RATIO, Level, at_level, log_ratio, segment_sizes, to_ratio

VALUES = torch.tensor([[1.0, 2.0, 4.0, 8.0], [3.0, 5.0, 7.0, 9.0], [1.0, 1.0, 1.0, 1.0]])
MASK = torch.tensor([[True, False, True, True], [True, True, True, True], [False] * 4])
TURNS = torch.tensor([[0, 0, 0, 1], [2, 2, 0, 0], [0, 0, 0, 0]])
GARBAGE = [math.nan, math.inf, -math.inf, 1e6, -1e6]


def test_masked_sum_and_mean() -> None:
    assert masked_sum(VALUES, MASK).tolist() == [13.0, 24.0, 0.0]
    assert masked_mean(VALUES, MASK).tolist() == pytest.approx([13 / 3, 6.0, 0.0])


def test_turn_sums_follow_the_ids_and_not_the_gaps() -> None:
    assert turn_sum(VALUES, MASK, TURNS).tolist() == [[5, 0, 5, 8], [8, 8, 16, 16], [0, 0, 0, 0]]
    assert turn_count(MASK, TURNS, torch.float32).tolist()[0] == [2, 1, 2, 1]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("reduction", ["sum", "mean", "turn"])
def test_reductions_and_their_gradients_do_not_see_garbage(garbage: float, reduction: str) -> None:
    def reduce(values: Tensor) -> Tensor:
        if reduction == "turn":
            return turn_sum(values, MASK, TURNS).square().sum()
        return (masked_sum if reduction == "sum" else masked_mean)(values, MASK).square().sum()

    clean = VALUES.clone().requires_grad_()
    dirty = torch.where(MASK, VALUES, garbage).requires_grad_()
    (clean_gradient,) = torch.autograd.grad(reduce(clean), clean)
    (dirty_gradient,) = torch.autograd.grad(reduce(dirty), dirty)

    assert torch.equal(reduce(clean), reduce(dirty))
    assert torch.equal(clean_gradient, dirty_gradient)
    assert bool((dirty_gradient[~MASK] == 0).all())


@pytest.mark.parametrize("level", list(Level))
def test_levels_pass_gradcheck(level: Level) -> None:
    values = VALUES.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: at_level(v, MASK, level, TURNS), (values,))


def test_a_level_of_one_token_each_is_the_token_itself() -> None:
    alone = torch.arange(4).expand(3, 4)
    for level in (Level.TURN_PRODUCT, Level.TURN_GEOMETRIC):
        assert torch.equal(at_level(VALUES, MASK, level, alone), fill_masked(VALUES, MASK))


def test_segment_sizes_count_action_tokens_only() -> None:
    sizes = {level: segment_sizes(MASK, level, TURNS, torch.float32)[0].tolist() for level in Level}
    assert sizes[Level.TOKEN] == [1, 1, 1, 1]
    assert sizes[Level.TURN_PRODUCT] == sizes[Level.TURN_GEOMETRIC] == [2, 1, 2, 1]
    assert sizes[Level.SEQUENCE_PRODUCT] == sizes[Level.GEOMETRIC] == [3, 3, 3, 3]


def test_a_log_ratio_of_bfloat16_is_taken_in_float32() -> None:
    upper = torch.tensor([[-7.03]], dtype=torch.bfloat16)
    lower = torch.tensor([[-0.0123]], dtype=torch.bfloat16)
    wide = log_ratio(upper, lower, torch.ones(1, 1, dtype=torch.bool))
    assert wide.dtype == torch.float32
    assert wide.item() == upper.float().item() - lower.float().item()
    assert wide.item() != (upper - lower).float().item()


def test_sums_are_taken_before_the_clamp() -> None:
    """50 - 30 is 20; clamped first it would be 0."""
    logs = torch.tensor([[50.0, -30.0]])
    whole = at_level(
        logs,
        torch.ones(1, 2, dtype=torch.bool),
        Level.SEQUENCE_PRODUCT,
        torch.zeros(1, 2, dtype=torch.int64),
    )
    assert whole.tolist() == [[20.0, 20.0]]
    assert torch.equal(to_ratio(logs), torch.tensor([[MAX_LOG_RATIO, -MAX_LOG_RATIO]]).exp())


def test_the_geometric_level_survives_a_long_answer_and_the_product_does_not() -> None:
    logs = torch.full((1, 8000), -0.001, dtype=torch.float64)
    mask, turns = torch.ones_like(logs, dtype=torch.bool), torch.zeros(1, 8000, dtype=torch.int64)
    product = to_ratio(at_level(logs, mask, Level.SEQUENCE_PRODUCT, turns))[0, 0].item()
    geometric = to_ratio(at_level(logs, mask, Level.GEOMETRIC, turns))[0, 0].item()
    assert product == pytest.approx(0.000335462628, rel=1e-6)
    assert geometric == pytest.approx(0.9990004998, rel=1e-9)


@pytest.mark.parametrize("bound", [bound for bound in Bound if bound not in SIGNED_BOUNDS])
def test_a_weight_is_detached_and_says_what_it_changed(bound: Bound) -> None:
    logs = torch.tensor([0.1, 1.0, 4.0], dtype=torch.float64).log().requires_grad_()
    weight = bound_weight(logs, bound, low=0.5, high=2.0)
    wanted = {
        Bound.NONE: ([0.1, 1.0, 4.0], [False, False, False]),
        Bound.TRUNCATE: ([0.1, 1.0, 2.0], [False, False, True]),
        Bound.CLIP: ([0.5, 1.0, 2.0], [True, False, True]),
        Bound.BAND: ([0.0, 1.0, 0.0], [True, False, True]),
    }
    values, changed = wanted[bound]
    assert weight.weight.tolist() == pytest.approx(values)
    assert weight.changed.tolist() == changed
    assert weight.rejected.tolist() == (changed if bound is Bound.BAND else [False] * 3)
    assert not weight.raw.requires_grad
    assert not weight.weight.requires_grad
