"""The critic's loss: half the squared error to the value targets, with PPO's value clip.

    1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)      openai/baselines, ppo2

R is the value target, V_old the value that the critic gave before the first optimiser step on the
batch. Pessimistic like the policy's clip: a token whose value has moved further than c away from
V_old is left alone, unless that made its error larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.checks import (
    require_finite,
    require_floating,
    require_given,
    require_mask,
    require_shape,
)
from correction.errors import InputError
from correction.masks import fill_masked
from correction.ratios import working_dtype


@dataclass(frozen=True, slots=True)
class ValueLosses:
    """Value losses [B, T] before aggregation, 0 where masked.

    clipped: bool [B, T], the clip was active: a gradient of exactly 0.
    """

    losses: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    value_targets: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None,
    clip: float | None,
) -> ValueLosses:
    """Value losses [B, T]. Formula: module docstring.

    values: [B, T], V with gradient. value_targets: [B, T], R, detached here. mask: [B, T] bool.
    old_values: [B, T], V_old, where there is a clip. clip: c, in units of the value, above 0;
    None leaves the plain squared error.

    A choice of the larger side and not torch.max, which splits the gradient where both sides are
    equal: that is every token before the first step. Raises InputError for shapes, dtypes, values
    that are not finite where the mask is true, a clip without old_values and a clip <= 0.
    """
    require_mask("action_mask", mask)
    dtype = working_dtype(values, value_targets)
    value = _filled("values", values, mask, dtype)
    target = _filled("value_targets", value_targets.detach(), mask, dtype)
    plain = (value - target).square()
    if clip is None:
        return ValueLosses(plain / 2.0, torch.zeros_like(mask))
    if not clip > 0:
        raise InputError(f"clip: must be > 0 or None, got {clip}")
    old = require_given("old_values", old_values, "the value clip")
    old = _filled("old_values", old.detach(), mask, dtype)
    # Inside of the clip this is V itself, not V_old + (V - V_old), which is V but for a rounding.
    held = torch.minimum(torch.maximum(value.detach(), old - clip), old + clip)
    pessimistic = (held - target).square()
    clipped = pessimistic > plain.detach()
    return ValueLosses(torch.where(clipped, pessimistic, plain) / 2.0, clipped)


def _filled(name: str, values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    require_floating(name, values)
    require_shape(name, values, tuple(mask.shape))
    require_finite(name, values.detach(), mask)
    return fill_masked(values.to(dtype), mask)
