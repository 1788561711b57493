"""Reductions over the action mask that never see what stands at masked places.

Every function replaces masked values by a constant *before* it computes. Multiplying by the mask
afterwards would not do: 0 x NaN is NaN, in the value and in the gradient. With the replacement,
NaN, infinities or 1e6 in the padding change neither, not by a bit.

Shapes: values [B, T] floating, mask [B, T] bool, turn_ids [B, T] int64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fill_masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`values` where the mask is true, `fill` elsewhere. The gradient of masked places is 0."""
    return torch.where(mask, values, fill)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of each row over its true places: [B, T] -> [B]. 0 for a row without any."""
    return fill_masked(values, mask).sum(dim=-1)


def masked_count(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """True places of each row: [B, T] -> [B], never below 1, so that it can be divided by."""
    return mask.sum(dim=-1).clamp(min=1).to(dtype)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row over its true places: [B, T] -> [B]. 0 for a row without any."""
    return masked_sum(values, mask) / masked_count(mask, values.dtype)


def turn_sum(values: Tensor, mask: Tensor, turn_ids: Tensor) -> Tensor:
    """For each true place the sum over the true places of its turn: [B, T] -> [B, T].

    Turns are told apart by their ids, never by gaps in the mask: two turns may touch. Ids are in
    [0, T) at true places. Masked places give 0.
    """
    ids = torch.where(mask, turn_ids, torch.zeros_like(turn_ids))
    per_turn = torch.zeros_like(values).scatter_add(1, ids, fill_masked(values, mask))
    return fill_masked(per_turn.gather(1, ids), mask)


def turn_count(mask: Tensor, turn_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """For each true place the number of true places of its turn: [B, T], 1 at masked places."""
    ones = torch.ones(mask.shape, dtype=dtype, device=mask.device)
    return turn_sum(ones, mask, turn_ids).clamp(min=1)
