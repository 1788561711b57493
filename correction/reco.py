"""ReCo, EXPERIMENTAL: its paper (arXiv 2607.26862) was not available to us.

The formulas come from its abstract and from a third-party reproduction. Whether the mean of the
probability is the length-normalised one and how the clip is applied is not verified: do not cite
results of these functions as the paper's.

    ratio     r = p (1 - p) / (p_old (1 - p_old)), the ratio of the variances of a token's choice
    gradient  r A grad log theta, cut off by a PPO-type clip on r
    weight    w_i = 1 / (G mean_p_i), bounded, divided by its mean over the group of G

Both aim at answers that are rare under the policy. Watch pass@1 beside pass@k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from correction.checks import (
    require_integers,
    require_logprobs,
    require_mask,
    require_shape,
)
from correction.group_statistics import find_groups, group_sum
from correction.masks import masked_mean
from correction.ratios import to_ratio, working_dtype
from correction.surrogates import TokenLosses, pessimistic_clip

SECONDARY_SOURCE = "from a secondary source; the primary text was not available"
"""Why nothing here is to be relied on."""


def reco_clip(
    target_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    probability_floor: float = 1e-5,
) -> TokenLosses:
    """PPO-type clip on the variance ratio r; the loss is -r A, its gradient -r A grad log theta.

    That is not the derivative of -r A: r is a number here, and the gradient passes straight
    through it to log theta. The reproduction clips at 0.2 on both sides.

    target_logprobs: [B, T] with gradient. anchor_logprobs: [B, T], log p_old. Masked places of
    both are filled already. advantages: [B, T] or [B, 1].
    probability_floor: probabilities are kept in [floor, 1 - floor] before the ratio is taken.
    """
    ratio = _variance(target_logprobs.detach(), probability_floor)
    ratio = ratio / _variance(anchor_logprobs.detach(), probability_floor)
    through = ratio * (1.0 + (target_logprobs - target_logprobs.detach()))
    return pessimistic_clip(through, advantages, clip_low=clip_low, clip_high=clip_high)


def reco_weights(
    behaviour_logprobs: Tensor, mask: Tensor, group_index: Tensor, *, max_weight: float = 5.0
) -> Tensor:
    """Weight of each trajectory: [N], mean 1 over the members of each group, detached.

    behaviour_logprobs: [N, T], log mu. mask: [N, T] bool. group_index: [N] int64, any values.
    max_weight: bound on 1 / (G mean_p), before the division by the mean.

    A row without action tokens is padding: weight 0, member of no group. Raises InputError for
    shapes, dtypes, and logprobs that are not finite or above 0.
    """
    require_mask("action_mask", mask)
    require_logprobs("behaviour_logprobs", behaviour_logprobs.detach(), mask)
    require_integers("group_index", group_index)
    require_shape("group_index", group_index, (mask.shape[0],))
    mean_logprobs = masked_mean(behaviour_logprobs.detach().double(), mask)
    groups = find_groups(group_index)
    member = mask.any(dim=-1).double()
    size = group_sum(member, groups).clamp(min=1)
    bounded = (to_ratio(-mean_logprobs) / size).clamp(max=max_weight) * member
    weights = torch.where(
        member > 0, bounded * size / group_sum(bounded, groups), torch.zeros_like(bounded)
    )
    return weights.to(working_dtype(behaviour_logprobs))


def _variance(logprobs: Tensor, floor: float) -> Tensor:
    """p (1 - p), with 1 - p taken from the log: near p = 1 the difference would be rounding."""
    kept = logprobs.clamp(math.log(floor), math.log1p(-floor))
    return kept.exp() * -torch.expm1(kept)
