"""Surrogate losses per token: what is differentiated. Losses are minimised.

    reinforce       - A log theta                                          Williams 1992
    cross_entropy   - log theta: labels of an expert, no advantage
    ppo_clip        r = theta/prox of the token, pessimistic clip          arXiv 1707.06347
                    with dual clip                                         arXiv 1912.09729
    gspo            the same clip on the trajectory's geometric ratio      arXiv 2507.18071
    cispo           - sg(clip(r, 1 - low, 1 + high)) A log theta           arXiv 2506.13585
    sapo            - A (4 / tau) sigmoid(tau (r - 1)), tau by sign of A   arXiv 2511.20347

GEPO (arXiv 2508.17850) is `ppo_clip` on log ratios of the group level: it needs no function of
its own. Score Centering and ReCo have files of their own.

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

    clipped_high: the ratio above its upper bound (1 + clip_high). clipped_low: below the lower
    one. clipped_dual: above the dual clip, negative advantage.

    Where the ratio itself is differentiated (ppo_clip, gspo, reco_clip) an active clip means a
    gradient of exactly 0. Where it only bounds a detached weight (cispo, score_centered) the
    token keeps its gradient, and the flags mark, for either sign of A, that the bound moved it.
    """

    losses: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def unclipped(losses: Tensor) -> TokenLosses:
    """Losses [B, T] of a surrogate that has no clip."""
    never = torch.zeros_like(losses, dtype=torch.bool)
    return TokenLosses(losses, never, never, never)


def reinforce(target_logprobs: Tensor, advantages: Tensor) -> TokenLosses:
    """-A log theta. No ratio inside: off-policy it needs a weight."""
    return unclipped(-advantages * target_logprobs)


def cross_entropy(target_logprobs: Tensor) -> TokenLosses:
    """-log theta, the supervised loss on tokens that an expert chose (DAgger, arXiv 1011.0686).

    Such tokens were not sampled by any policy of ours: no ratio and no weight belongs to them.
    """
    return unclipped(-target_logprobs)


def pessimistic_clip(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> TokenLosses:
    """PPO's clip on any ratio [B, T] with gradient; parameters as in `ppo_clip`.

    Written as a choice of the effective ratio: torch's max and min would split the gradient where
    both sides are equal, and the choice is also what the clip fractions count.
    """
    sign = advantages.sign()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped_high = (sign > 0) & (ratio > high)
    clipped_low = (sign < 0) & (ratio < low)
    clipped_dual = (sign < 0) & (ratio > dual_clip) & (dual_clip > 0)
    held = ratio.detach().masked_fill(clipped_high, high).masked_fill(clipped_low, low)
    held = held.masked_fill(clipped_dual, dual_clip)
    effective = torch.where(clipped_low | clipped_high | clipped_dual, held, ratio)
    return TokenLosses(-advantages * effective, clipped_low, clipped_high, clipped_dual)


def ppo_clip(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> TokenLosses:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 at most -dual_clip A.

    log_ratios: [B, T] log theta/prox of any level, with gradient.
    dual_clip: largest ratio that counts for a negative advantage, above 1 + clip_high; 0 is off.
    """
    return pessimistic_clip(
        to_ratio(log_ratios),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


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


def cispo(
    log_ratios: Tensor,
    target_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log theta: REINFORCE with a bounded weight.

    A clipped token keeps its gradient, at the bound's weight, whatever the sign of A.
    clip_low: 1 or more leaves the ratio without a lower bound, as in the paper.
    clip_high: above 1, not absolute: a cap of 5 on the ratio is clip_high = 4.
    """
    ratio = to_ratio(log_ratios.detach())
    low, high = 1.0 - clip_low, 1.0 + clip_high
    losses = -ratio.clamp(low, high) * advantages * target_logprobs
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLosses(losses, ratio < low, ratio > high, never)


def sapo(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> TokenLosses:
    """-A (4 / tau) sigmoid(tau (r - 1)): a gate that closes smoothly instead of a clip.

    The gradient is -A r 4 s (1 - s) with s the sigmoid: that of PPO at r = 1, fading on both
    sides. tau is temperature_positive where A > 0, else temperature_negative; both > 0, and the
    larger one fades faster.
    """
    ratio = to_ratio(log_ratios)
    tau = torch.full_like(advantages, temperature_negative, dtype=ratio.dtype)
    tau = tau.masked_fill(advantages > 0, temperature_positive)
    return unclipped((-4.0 * advantages / tau) * torch.sigmoid(tau * (ratio - 1.0)))
