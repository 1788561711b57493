"""Importance ratios, kept as logs until the last moment, and the levels at which they are taken.

Notation: mu behaviour policy, prox proximal policy, theta target policy; l a token's log ratio.

    level              log ratio of a token                         source
    token              l_t                                          PPO, arXiv 1707.06347
    turn_product       sum of l over the token's turn
    turn_geometric     mean of l over the token's turn              arXiv 2512.24873 (chunk = turn)
    sequence_product   sum of l over the trajectory                 importance sampling proper
    geometric          mean of l over the trajectory                GSPO, arXiv 2507.18071

Only the sequence product is unbiased; `geometric` is *not* the ratio of sequence probabilities.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from correction.masks import fill_masked, masked_count, masked_sum, turn_count, turn_sum

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-20 before exp, at every level: e**20 squared still fits fp32."""


class Level(StrEnum):
    """Unit of text whose ratio a token carries. Formulas: module docstring."""

    TOKEN = "token"
    TURN_PRODUCT = "turn_product"
    TURN_GEOMETRIC = "turn_geometric"
    SEQUENCE_PRODUCT = "sequence_product"
    GEOMETRIC = "geometric"


def working_dtype(*values: Tensor) -> torch.dtype:
    """float64 if any argument is float64, else float32. Nothing is computed in 16 bits."""
    widest = torch.float32
    for tensor in values:
        widest = torch.promote_types(widest, tensor.dtype)
    return widest


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Token log ratios, log numerator - log denominator: [B, T], not clamped, 0 where masked.

    numerator, denominator: [B, T] logprobs (natural log) of the same tokens. Both are widened
    before they are subtracted: in bfloat16 the difference of two logprobs is mostly rounding.
    """
    dtype = working_dtype(numerator, denominator)
    return fill_masked(numerator.to(dtype) - denominator.to(dtype), mask)


def segment_sizes(mask: Tensor, level: Level, turn_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Number of action tokens that share one ratio at `level`: [B, T], at least 1."""
    if level is Level.TOKEN:
        return torch.ones(mask.shape, dtype=dtype, device=mask.device)
    if level in (Level.TURN_PRODUCT, Level.TURN_GEOMETRIC):
        return turn_count(mask, turn_ids, dtype)
    return masked_count(mask, dtype)[:, None].expand(mask.shape)


def at_level(log_ratios: Tensor, mask: Tensor, level: Level, turn_ids: Tensor) -> Tensor:
    """Log ratio of the unit that each token belongs to: [B, T] -> [B, T], 0 where masked.

    log_ratios: [B, T] token log ratios. Not clamped: sums are taken before any clamp.
    """
    if level is Level.TOKEN:
        return fill_masked(log_ratios, mask)
    if level in (Level.TURN_PRODUCT, Level.TURN_GEOMETRIC):
        total = turn_sum(log_ratios, mask, turn_ids)
    else:
        total = masked_sum(log_ratios, mask)[:, None].expand(mask.shape)
    if level in (Level.TURN_GEOMETRIC, Level.GEOMETRIC):
        total = total / segment_sizes(mask, level, turn_ids, total.dtype)
    return fill_masked(total, mask)


def to_ratio(log_ratios: Tensor) -> Tensor:
    """exp of a log ratio of any level, clamped to +-MAX_LOG_RATIO first. Same shape."""
    return clamp_log_ratios(log_ratios).exp()


def clamp_log_ratios(log_ratios: Tensor) -> Tensor:
    """Log ratios within +-MAX_LOG_RATIO; at the bound and beyond the gradient is 0. Same shape."""
    # torch.clamp, but its backward is one pass instead of four: half the time of the whole exp.
    return torch.nn.functional.hardtanh(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)
