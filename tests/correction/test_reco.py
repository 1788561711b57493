from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.errors import InputError
from correction.reco import reco_clip, reco_weights

A = torch.tensor([[1.5], [-2.0], [0.0]], dtype=torch.float64)
ANCHOR = torch.tensor([[0.3, 0.9, 0.5]] * 3, dtype=torch.float64).log()
TARGET = torch.tensor([[0.31, 0.95, 0.04], [0.32, 0.85, 0.5], [0.2, 0.8, 0.1]]).double().log()


def evaluate(target: Tensor, anchor: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, their gradient, and where the clip was active, at 0.2 on both sides."""
    target = target.clone().requires_grad_()
    token = reco_clip(target, anchor, a, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(token.losses.sum(), target)
    return token.losses.detach(), gradient, token.clipped_low | token.clipped_high


def test_value_and_gradient_are_the_ratio_times_the_advantage_until_it_is_clipped() -> None:
    """The gradient passes straight through the ratio: by formula, gradcheck would see another."""
    losses, gradient, clipped = evaluate(TARGET, ANCHOR, A)

    p, p_old = TARGET.exp(), ANCHOR.exp()
    ratio = p * (1 - p) / (p_old * (1 - p_old))
    held = torch.where(clipped, ratio.clamp(0.8, 1.2), ratio)
    torch.testing.assert_close(losses, -held * A)
    torch.testing.assert_close(gradient, torch.where(clipped, 0.0, -ratio * A))
    assert clipped.tolist() == [[False] * 3, [False] * 3, [False] * 3]
    _, _, clipped = evaluate(TARGET, ANCHOR, -A)
    assert clipped.tolist() == [[False, True, True], [False, True, False], [False] * 3]


@settings(max_examples=50, deadline=None)
@given(p=st.floats(0.01, 0.99), p_old=st.floats(0.01, 0.99), a=st.floats(-3, 3))
def test_the_clip_is_ppos_on_the_ratio_of_variances(p: float, p_old: float, a: float) -> None:
    def column(x: float) -> Tensor:
        return torch.tensor([[x]], dtype=torch.float64)

    losses, gradient, clipped = evaluate(column(p).log(), column(p_old).log(), column(a))

    ratio = p * (1 - p) / (p_old * (1 - p_old))
    worst = max(-ratio * a, -min(max(ratio, 0.8), 1.2) * a)
    assert float(losses) == pytest.approx(worst, rel=1e-9, abs=1e-12)
    wanted = 0.0 if bool(clipped) else -ratio * a
    assert float(gradient) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_a_ratio_of_one_leaves_the_policy_gradient() -> None:
    losses, gradient, clipped = evaluate(ANCHOR, ANCHOR, A)
    assert torch.equal(losses, -A.expand(3, 3))
    assert torch.equal(gradient, -A.expand(3, 3))
    assert not clipped.any()


def test_near_certainty_the_ratio_is_exact_in_float32() -> None:
    """1 - p would be rounding: at p = 1 - 5e-5 fp32 keeps only three digits of it."""
    p, p_old = math.log1p(-5e-5), math.log1p(-6e-5)
    losses, _, _ = evaluate(torch.tensor([[p]]), torch.tensor([[p_old]]), torch.tensor([[-1.0]]))
    exact = (1 - 5e-5) * 5e-5 / ((1 - 6e-5) * 6e-5)
    assert float(losses) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("logprobs", [(0.0, 0.0), (0.0, -1e6), (-1e6, 0.0), (-1e6, -1e6)])
def test_the_probability_floor_keeps_everything_finite(
    dtype: torch.dtype, logprobs: tuple[float, float]
) -> None:
    target, anchor = (torch.full((3, 1), value, dtype=dtype) for value in logprobs)
    losses, gradient, _ = evaluate(target, anchor, A.to(dtype))
    torch.testing.assert_close(losses, -A.to(dtype), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(gradient, -A.to(dtype), rtol=1e-3, atol=0.0)


def trajectories(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, mask and group index of seven trajectories in three groups, unordered."""
    random = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(7, 5, generator=random, dtype=torch.float64) * 2
    mask = torch.rand(7, 5, generator=random) < 0.6
    mask[:, 0] = True
    return logprobs, mask, torch.tensor([30, -1, 30, 5, -1, 30, 5])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), bound=st.floats(0.5, 5.0))
def test_weights_are_those_of_the_formula_in_every_group(seed: int, bound: float) -> None:
    logprobs, mask, group = trajectories(seed)
    weights = reco_weights(logprobs, mask, group, max_weight=bound)
    for index in (30, -1, 5):
        members = (group == index).nonzero()[:, 0].tolist()
        raw = [
            min(math.exp(-float(logprobs[i][mask[i]].mean())) / len(members), bound)
            for i in members
        ]
        wanted = [w * len(members) / math.fsum(raw) for w in raw]
        assert weights[members].tolist() == pytest.approx(wanted, rel=1e-12)
        assert float(weights[members].mean()) == pytest.approx(1.0, rel=1e-12)


def test_equally_likely_answers_have_weight_one() -> None:
    logprobs, mask, group = trajectories(0)
    weights = reco_weights(torch.full_like(logprobs, -0.7), mask, group)
    torch.testing.assert_close(weights, torch.ones_like(weights), rtol=1e-15, atol=0)


def test_rare_answers_weigh_more_up_to_the_bound() -> None:
    mask = torch.ones(3, 1, dtype=torch.bool)
    logprobs = torch.tensor([[-0.1], [-1.0], [-300.0]])
    weights = reco_weights(logprobs, mask, torch.zeros(3, dtype=torch.int64), max_weight=5.0)
    assert weights.dtype == torch.float32
    assert weights[0] < weights[1] < weights[2] < 3.0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
def test_masked_places_and_padding_rows_change_no_bit(garbage: float) -> None:
    logprobs, mask, group = trajectories(3)
    weights = reco_weights(logprobs, mask, group)
    dirty = torch.where(mask, logprobs, garbage)
    assert torch.equal(reco_weights(dirty, mask, group), weights)

    padded = reco_weights(
        torch.cat([dirty, torch.full((2, 5), garbage, dtype=torch.float64)]),
        torch.cat([mask, torch.zeros(2, 5, dtype=torch.bool)]),
        torch.cat([group, torch.tensor([30, 99])]),
    )
    assert torch.equal(padded, torch.cat([weights, torch.zeros(2, dtype=torch.float64)]))


def test_bad_input_is_named() -> None:
    logprobs, mask, group = trajectories(1)
    with pytest.raises(InputError, match="behaviour_logprobs: a logprob must be <= 0"):
        reco_weights(logprobs.exp(), mask, group)
    with pytest.raises(InputError, match=r"behaviour_logprobs: expected shape \[7, 5\]"):
        reco_weights(logprobs[:, :4], mask, group)
    with pytest.raises(InputError, match="behaviour_logprobs: 1 non-finite"):
        reco_weights(torch.where(torch.arange(35).view(7, 5) == 0, math.nan, logprobs), mask, group)
    with pytest.raises(InputError, match=r"group_index: expected dtype torch\.int64"):
        reco_weights(logprobs, mask, group.float())
    with pytest.raises(InputError, match=r"group_index: expected shape \[7\]"):
        reco_weights(logprobs, mask, group[:6])
    with pytest.raises(InputError, match="action_mask: no place is true"):
        reco_weights(logprobs, torch.zeros_like(mask), group)
