"""The proximal policy: the anchor of the trust region.

recompute   the target policy as it was before the first optimiser step on the batch; the learner
            keeps the detached logprobs of its first pass, no extra forward pass (decoupled
            PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298)
log_linear  the policy one version behind theta, read off the straight line between log mu and
            log theta: no logprobs are kept (A-3PO, arXiv 2512.06547)
behaviour   the anchor is mu itself ("bypass")
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from correction.checks import (
    require_given,
    require_integers,
    require_mask,
    require_range,
    require_shape,
    require_tokens,
)
from correction.errors import InputError
from correction.masks import fill_masked
from correction.ratios import log_ratio, working_dtype


class Proximal(StrEnum):
    """Where the proximal logprobs come from. Meaning: module docstring."""

    RECOMPUTE = "recompute"
    LOG_LINEAR = "log_linear"
    BEHAVIOUR = "behaviour"


def proximal_anchor(
    proximal: Proximal,
    recomputed_logprobs: Tensor | None,
    behaviour_logprobs: Tensor,
    *,
    target_logprobs: Tensor | None = None,
    lag_versions: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Logprobs of the proximal policy, [B, T], detached.

    recomputed_logprobs: [B, T] that the learner kept; looked at under `recompute` only.
    target_logprobs, lag_versions, mask: [B, T] as in `loglinear_proximal`, looked at under
    `log_linear` only. Raises InputError where one is needed and missing.
    """
    if proximal is Proximal.BEHAVIOUR:
        return behaviour_logprobs.detach()
    if proximal is Proximal.RECOMPUTE:
        if recomputed_logprobs is None:
            raise InputError(
                "proximal_logprobs: this recipe needs the learner's own scores, got None"
            )
        return recomputed_logprobs.detach()
    needed_by = "proximal = log_linear"
    return loglinear_proximal(
        require_given("target_logprobs", target_logprobs, needed_by),
        behaviour_logprobs,
        require_given("lag_versions", lag_versions, needed_by),
        require_given("action_mask", mask, needed_by),
    )


def loglinear_proximal(
    target_logprobs: Tensor, behaviour_logprobs: Tensor, lag_versions: Tensor, mask: Tensor
) -> Tensor:
    """log prox = log mu + alpha (log theta - log mu): [B, T], detached, 0 where masked.

    alpha is how far from mu's version to theta's the proximal one lies, at v_theta - 1: for a lag
    of n versions (n - 1) / n, per token. At a lag of 0 or 1 the anchor is mu to the bit. In
    general theta/prox = (theta/mu) ** (1 / n) and prox/mu = (theta/mu) ** ((n - 1) / n).

    target_logprobs: [B, T] floating, log theta of now, not of before the first step.
    behaviour_logprobs: [B, T] floating. lag_versions: [B, T] int64, v_theta - v_mu >= 0.
    mask: [B, T] bool. Raises InputError for shapes, dtypes, a mask without a true, and a negative
    lag or non-finite logprobs where it is true.
    """
    require_mask("action_mask", mask)
    require_tokens("target_logprobs", target_logprobs.detach(), mask)
    require_tokens("behaviour_logprobs", behaviour_logprobs.detach(), mask)
    require_integers("lag_versions", lag_versions)
    require_shape("lag_versions", lag_versions, tuple(mask.shape))
    require_range("lag_versions", lag_versions, mask, 0, None)
    dtype = working_dtype(target_logprobs, behaviour_logprobs)
    lag = torch.where(mask, lag_versions, 0).clamp(min=1).to(dtype)
    away = log_ratio(target_logprobs.detach(), behaviour_logprobs.detach(), mask)
    return fill_masked(behaviour_logprobs.detach().to(dtype), mask) + (lag - 1) / lag * away
