"""The proximal policy: the anchor of the trust region.

recompute   the target policy as it was before the first optimiser step on the batch; the learner
            keeps the detached logprobs of its first pass, no extra forward pass (decoupled
            PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298)
behaviour   the anchor is mu itself ("bypass")
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor

from correction.errors import InputError


class Proximal(StrEnum):
    """Where the proximal logprobs come from. Meaning: module docstring."""

    RECOMPUTE = "recompute"
    BEHAVIOUR = "behaviour"
    LOG_LINEAR = "log_linear"


def proximal_anchor(
    proximal: Proximal,
    recomputed_logprobs: Tensor | None,
    behaviour_logprobs: Tensor,
    target_logprobs=None,
    lag_versions=None,
    mask=None,
) -> Tensor:
    """Logprobs of the proximal policy, [B, T], detached.

    recomputed_logprobs: [B, T] that the learner kept; looked at under `recompute`
    only. Raises InputError where it is needed and missing.
    """
    if proximal is Proximal.BEHAVIOUR:
        return behaviour_logprobs.detach()
    if recomputed_logprobs is None:
        raise InputError("proximal_logprobs: this recipe needs the learner's own scores, got None")
    return recomputed_logprobs.detach()
