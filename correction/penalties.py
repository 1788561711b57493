"""Penalties beside the surrogate: the KL to a reference policy, and the pull back to mu.

With x = log theta - log ref of a token that theta sampled, each estimates KL(theta || ref), the
reverse direction (Schulman, "Approximating KL Divergence", 2020):

    estimator   value           gradient in log theta   mean gradient as a loss, under theta
    k1          x               1                       0: useless as a loss
    k2          x^2 / 2         x                       that of KL(theta || ref), exactly
    k3          exp(-x) - 1 + x 1 - exp(-x)             that of KL(ref || theta), the forward one
    k3_plus     as k3           as k2                   that of KL(theta || ref), exactly

k1 and k3 have the KL as their mean, k2 is biased. So: k1 belongs in the reward
(`kl_token_rewards`), k2 and k3_plus into the loss, k3 where GRPO (arXiv 2402.03300) is followed.

Tokens of another sampler mu are reweighted by theta/mu ("unbiased KL" of DeepSeek-V3.2, arXiv
2512.02556): `log_importance`. Then every one of the four has the exact gradient of
KL(theta || ref) as its mean under mu; for k1 and k3 because the gradient flows through theta/mu
too (for k3 it becomes theta/mu x), for k2 and k3_plus because it does not.

x is clamped to +-20 (`ratios.MAX_LOG_RATIO`); beyond, a penalty is constant and has no gradient.
Penalties are [B, T], 0 where masked, not multiplied by any coefficient; the caller aggregates
them with the denominators of the policy loss. Rejected tokens keep their penalty.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import Tensor

from correction.checks import require_given, require_logprobs, require_mask, require_shape
from correction.errors import InputError
from correction.masks import fill_masked
from correction.ratios import clamp_log_ratios, log_ratio, to_ratio

MAX_ADAPTATION = 0.2
"""Largest relative error of the measured KL that one adaptation of the coefficient acts on."""


class KlEstimator(StrEnum):
    """Estimator of KL(theta || ref) of one token. Formulas and gradients: module docstring."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_PLUS = "k3_plus"


def kl_penalty(
    target_logprobs: Tensor,
    reference_logprobs: Tensor | None,
    mask: Tensor,
    estimator: KlEstimator,
    *,
    log_importance: Tensor | None = None,
) -> Tensor:
    """KL to the reference of each token: [B, T] with gradient in `target_logprobs` only.

    target_logprobs: [B, T], log theta. reference_logprobs: [B, T], log ref, detached here.
    mask: [B, T] bool.
    log_importance: [B, T], token log theta/mu *with* gradient, for tokens that mu sampled; None
        for none. Its gradient is used where the estimator's mean is right with it (k1, k3).

    Raises InputError for a missing reference, shapes, dtypes, and logprobs that are not finite or
    above 0 where the mask is true.
    """
    require_mask("action_mask", mask)
    reference = require_given("reference_logprobs", reference_logprobs, "the KL penalty")
    away = _clamped_log_ratio(
        "target_logprobs", target_logprobs, "reference_logprobs", reference, mask
    )
    penalty = estimate_kl(away, estimator)
    if log_importance is None:
        return penalty
    require_shape("log_importance", log_importance, tuple(mask.shape))
    if estimator in (KlEstimator.K2, KlEstimator.K3_PLUS):
        log_importance = log_importance.detach()
    return penalty * to_ratio(fill_masked(log_importance, mask))


def estimate_kl(log_ratios: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimator at x = log theta/ref, clamped already, any shape. 0 where x is 0."""
    if estimator is KlEstimator.K1:
        return log_ratios
    if estimator is KlEstimator.K2:
        return log_ratios.square() / 2.0
    # expm1: near ratio 1 the terms of exp(-x) - 1 + x cancel to nothing in fp32.
    k3 = torch.expm1(-log_ratios) + log_ratios
    if estimator is KlEstimator.K3:
        return k3
    k2 = log_ratios.square() / 2.0
    return k3.detach() + (k2 - k2.detach())


def log_ratio_square(target_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Second moment of the token log ratio to mu: (log theta/mu)^2, [B, T] with gradient.

    prime-rl adds 1e-3 times its sum to the loss, over all action tokens: those that a trust mask
    rejected too, so that nothing but this pulls them back. Twice the k2 of the pair (theta, mu).
    Raises InputError as `kl_penalty` does.
    """
    require_mask("action_mask", mask)
    away = _clamped_log_ratio(
        "target_logprobs", target_logprobs, "behaviour_logprobs", behaviour_logprobs, mask
    )
    return away.square()


def kl_token_rewards(
    sampler_logprobs: Tensor,
    reference_logprobs: Tensor | None,
    mask: Tensor,
    *,
    coefficient: float,
) -> Tensor:
    """-coefficient x k1 of each token: [B, T], detached, to be added to the token rewards.

    The KL as a reward (InstructGPT, arXiv 2203.02155: coefficient 0.02). The trajectory's own
    reward is added by the caller, at its last action token.

    sampler_logprobs: [B, T], log of the policy that acted, prox or mu: a reward does not depend
        on theta. reference_logprobs: [B, T]. mask: [B, T] bool. Raises InputError as `kl_penalty`.
    """
    require_mask("action_mask", mask)
    reference = require_given("reference_logprobs", reference_logprobs, "the KL reward")
    away = _clamped_log_ratio(
        "sampler_logprobs", sampler_logprobs.detach(), "reference_logprobs", reference, mask
    )
    return -coefficient * away


def adaptive_coefficient(
    coefficient: float, measured_kl: float, *, target: float, horizon: float, n: int
) -> float:
    """The coefficient after `n` more trajectories whose KL to the reference was `measured_kl`.

    coefficient x (1 + clip(measured_kl / target - 1, +-0.2) n / horizon), arXiv 1909.08593.

    measured_kl: nats, in the unit of `target` (a trajectory's sum in the paper); estimates may be
    negative. horizon: trajectories over which the coefficient moves by at most a fifth.
    Raises InputError for a measured_kl or coefficient that is not finite, a coefficient, target
    or horizon that is not positive, and n that is negative or above horizon.
    """
    if not (math.isfinite(measured_kl) and 0 < coefficient < math.inf):
        raise InputError(
            f"adaptive_coefficient: measured_kl {measured_kl} must be finite and the coefficient "
            f"{coefficient} positive and finite"
        )
    if not (target > 0 and horizon > 0 and 0 <= n <= horizon):
        raise InputError(
            f"adaptive_coefficient: target {target} and horizon {horizon} must be > 0, n {n} in "
            "[0, horizon]"
        )
    error = min(max(measured_kl / target - 1.0, -MAX_ADAPTATION), MAX_ADAPTATION)
    return coefficient * (1.0 + error * n / horizon)


def _clamped_log_ratio(
    name: str, logprobs: Tensor, other_name: str, other: Tensor, mask: Tensor
) -> Tensor:
    """log ratio of two checked policies, the second one detached; 0 where masked."""
    require_logprobs(name, logprobs.detach(), mask)
    require_logprobs(other_name, other.detach(), mask)
    return clamp_log_ratios(log_ratio(logprobs, other.detach(), mask))
