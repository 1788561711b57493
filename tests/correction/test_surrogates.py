from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from correction.surrogates import cispo, cross_entropy, gspo, ppo_clip, reinforce, sapo

A = torch.tensor([[1.5], [-2.0], [0.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, True], [True, True, True]])


def logs() -> Tensor:
    """Ratios inside and outside of every bound of 0.2 and of a dual clip of 3, never on one."""
    ratios = [[0.5, 1.1, 1.7], [0.6, 0.9, 4.0], [2.0, 0.1, 1.0]]
    return torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()


@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
def test_ppo_clip_passes_gradcheck(dual_clip: float) -> None:
    def losses(values: Tensor) -> Tensor:
        token = ppo_clip(values, A, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)
        return token.losses

    assert torch.autograd.gradcheck(losses, (logs(),))


def test_gspo_passes_gradcheck() -> None:
    def losses(values: Tensor) -> Tensor:
        return gspo(values, MASK, A, clip_low=0.2, clip_high=0.2).losses

    assert torch.autograd.gradcheck(losses, (logs(),))


def test_reinforce_passes_gradcheck() -> None:
    assert torch.autograd.gradcheck(lambda values: reinforce(values, A).losses, (logs(),))


def test_cross_entropy_passes_gradcheck() -> None:
    assert torch.autograd.gradcheck(lambda values: cross_entropy(values).losses, (logs(),))


@pytest.mark.parametrize("taus", [(1.0, 1.05), (0.3, 2.5)])
def test_sapo_passes_gradcheck(taus: tuple[float, float]) -> None:
    def losses(values: Tensor) -> Tensor:
        positive, negative = taus
        return sapo(values, A, temperature_positive=positive, temperature_negative=negative).losses

    assert torch.autograd.gradcheck(losses, (logs(),))


def test_cispo_has_the_gradient_of_reinforce_times_its_bounded_ratio() -> None:
    """The ratio is detached: gradcheck would see its derivative too, so this is by formula."""
    target = torch.tensor([[-0.5, -1.0, -2.0]] * 3, dtype=torch.float64, requires_grad=True)
    token = cispo(logs(), target, A, clip_low=0.2, clip_high=0.5)
    (gradient,) = torch.autograd.grad(token.losses.sum(), target)

    bounded = [[0.8, 1.1, 1.5], [0.8, 0.9, 1.5], [1.5, 0.8, 1.0]]
    weight = torch.tensor(bounded, dtype=torch.float64)
    torch.testing.assert_close(gradient, -weight * A)
    torch.testing.assert_close(token.losses, -weight * A * target)
    assert token.clipped_low.tolist() == [[True, False, False], [True, False, False], [0, 1, 0]]
    assert token.clipped_high.tolist() == [[False, False, True], [False, False, True], [1, 0, 0]]
    assert not token.clipped_dual.any()


def test_the_ratio_in_cispo_is_no_path_for_the_gradient() -> None:
    values, target = logs(), torch.full((3, 3), -1.0, dtype=torch.float64, requires_grad=True)
    token = cispo(values, target, A, clip_low=0.2, clip_high=0.5)
    with pytest.raises(RuntimeError, match="to not have been used in the graph"):
        torch.autograd.grad(token.losses.sum(), values)


@pytest.mark.parametrize("clip_low", [1.0, 2.0])
def test_cispo_has_no_lower_bound_from_a_clip_of_one_on(clip_low: float) -> None:
    tiny = torch.full((1, 1), -15.0, dtype=torch.float64)
    token = cispo(tiny, torch.full_like(tiny, -1.0), A[:1], clip_low=clip_low, clip_high=3.0)
    assert float(token.losses) == pytest.approx(1.5 * math.exp(-15.0), rel=1e-12)
    assert not token.clipped_low.any()


def test_on_policy_every_surrogate_has_the_gradient_of_reinforce() -> None:
    anchor = torch.tensor([[-0.3, -1.7, -4.0]] * 3, dtype=torch.float64)
    target = anchor.clone().requires_grad_()
    away = target - anchor
    gradients = [
        torch.autograd.grad(token.losses.sum(), target, retain_graph=True)[0]
        for token in (
            reinforce(target, A),
            ppo_clip(away, A, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
            cispo(away, target, A, clip_low=1.0, clip_high=4.0),
            sapo(away, A),
        )
    ]
    for gradient in gradients:
        assert torch.equal(gradient, -A.expand(3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("away", [1e6, -1e6, 60.0, -60.0])
def test_no_ratio_makes_a_loss_or_a_gradient_non_finite(dtype: torch.dtype, away: float) -> None:
    values = torch.full((3, 1), away, dtype=dtype, requires_grad=True)
    target = torch.full((3, 1), -1.0, dtype=dtype, requires_grad=True)
    a = A.to(dtype)
    for token in (cispo(values, target, a, clip_low=1.0, clip_high=4.0), sapo(values, a)):
        total = token.losses.sum() + 0.0 * values.sum()
        gradients = torch.autograd.grad(total, (values, target), allow_unused=True)
        assert torch.isfinite(token.losses).all()
        assert all(torch.isfinite(g).all() for g in gradients if g is not None)


def test_the_gate_of_sapo_closes_on_both_sides_and_sooner_for_negative_advantages() -> None:
    ratios = torch.tensor([0.01, 0.5, 1.0, 2.0, 8.0], dtype=torch.float64)
    pulls = []
    for a in (1.0, -1.0):
        values = ratios.log()[None].requires_grad_()
        token = sapo(values, torch.tensor([[a]], dtype=torch.float64))
        (gradient,) = torch.autograd.grad(token.losses.sum(), values)
        pulls.append((gradient[0] / ratios).abs())  # what is left of the ratio's own gradient
    positive, negative = pulls
    assert positive.argmax() == negative.argmax() == 2
    assert bool((negative < positive)[ratios != 1.0].all())


def test_an_active_clip_has_no_gradient_and_everything_else_has() -> None:
    values = logs()
    token = ppo_clip(values, A, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(token.losses.sum(), values)
    active = token.clipped_low | token.clipped_high | token.clipped_dual

    assert token.clipped_high.tolist() == [[False, False, True], [False] * 3, [False] * 3]
    assert token.clipped_low.tolist() == [[False] * 3, [True, False, False], [False] * 3]
    assert token.clipped_dual.tolist() == [[False] * 3, [False, False, True], [False] * 3]
    moving = gradient != 0
    assert torch.equal(moving, ~active & (A != 0))


def test_the_gradient_inside_the_clip_is_minus_r_a_also_on_policy() -> None:
    """At r = 1 both sides of the max are equal; the gradient must not be split."""
    values = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
    token = ppo_clip(values, A, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(token.losses.sum(), values)
    assert gradient[:, 0].tolist() == [-1.5, 2.0, 0.0]


def test_gspo_decides_once_a_trajectory_and_ignores_masked_tokens() -> None:
    values = logs()
    token = gspo(values, MASK, A, clip_low=3e-4, clip_high=4e-4)
    for row in range(3):
        assert len(set(token.losses[row].tolist())) == 1
        assert len(set(token.clipped_low[row].tolist())) == 1
    moved = values.detach() + torch.where(MASK, 0.0, 5.0)
    assert torch.equal(gspo(moved, MASK, A, clip_low=3e-4, clip_high=4e-4).losses, token.losses)
