"""Surrogate losses per token: what is differentiated. Losses are minimised.

    ppo_clip    r = theta/prox of the token, pessimistic clip         arXiv 1707.06347
                with dual clip                                        arXiv 1912.09729
    gspo        the same clip on the trajectory's geometric ratio     arXiv 2507.18071
    reinforce   - A log theta                                         Williams 1992

Shapes: log_ratios, target_logprobs [B, T]; advantages [B, T], or [B, 1] for one a trajectory;
mask [B, T] bool -> losses [B, T]. Masked places of the inputs must already be filled
(`masks.fill_masked`, `ratios.log_ratio`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.masks import masked_mean
from correction.ratios import to_ratio


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Losses [B, T] before weight and aggregation, and where the clip was active (bool [B, T]).

    An active clip means a gradient of exactly 0. clipped_high: the ratio above 1 + clip_high.
    clipped_low: below 1 - clip_low. clipped_dual: above the dual clip, negative advantage.
    """

    losses: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def ppo_clip(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> TokenLosses:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 at most -dual_clip A.

    dual_clip: largest ratio that counts for a negative advantage, above 1 + clip_high; 0 is off.
    Written as a choice of the effective ratio: torch's max and min would split the gradient where
    both sides are equal, and the choice is also what the clip fractions count.
    """
    ratio = to_ratio(log_ratios)
    sign = advantages.sign()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped_high = (sign > 0) & (ratio > high)
    clipped_low = (sign < 0) & (ratio < low)
    clipped_dual = (sign < 0) & (ratio > dual_clip) & (dual_clip > 0)
    effective = ratio.masked_fill(clipped_high, high).masked_fill(clipped_low, low)
    effective = effective.masked_fill(clipped_dual, dual_clip)
    return TokenLosses(-advantages * effective, clipped_low, clipped_high, clipped_dual)


def gspo(
    log_ratios: Tensor, mask: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> TokenLosses:
    """PPO's clip on s = exp(mean of the trajectory's token log ratios), one decision a trajectory.

    Every action token carries its trajectory's loss, so that a mean over the trajectory's tokens
    gives the paper's objective and each token's gradient is s A / (number of action tokens).
    The mean is over the original action mask, before any rejection.
    """
    mean = masked_mean(log_ratios, mask)[:, None].expand(log_ratios.shape)
    return ppo_clip(mean, advantages, clip_low=clip_low, clip_high=clip_high)


def reinforce(target_logprobs: Tensor, advantages: Tensor) -> TokenLosses:
    """-A log theta. No ratio inside: off-policy it needs a weight."""
    never = torch.zeros_like(target_logprobs, dtype=torch.bool)
    return TokenLosses(-advantages * target_logprobs, never, never, never)
