from __future__ import annotations

import pytest
import torch
from torch import Tensor

from correction.surrogates import gspo, ppo_clip, reinforce

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
