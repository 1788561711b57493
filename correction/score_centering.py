"""Score Centering: the policy gradient minus its drift (arXiv 2609.20807).

Under a sampler mu that is not theta, even a constant advantage moves the policy: the mean of
w grad log theta over mu is not 0. That drift is subtracted per token. mu is known on its head H,
the k most probable ids of each place; outside of it mu is modelled as theta rescaled by rho.

    w       weight of a token at x = theta/mu, see CenteredWeight
    rho     max(1 - mu(H), 1e-6) / max(1 - theta(H), 1e-6)       tail ratio
    alpha   rho w(1 / rho)
    c_v     mu_v w(theta_v / mu_v) - alpha theta_v               coefficient of v in H, detached
    loss    -A ( sg(w_y) log theta_y - sum over H of c_v log theta_v )

Facts, all tested: a constant advantage has a mean update of 0 where the model of the tail is
exact; with w = 1 and the whole vocabulary as the head the gradient in the logits is exactly
-A (e_y - mu); the untruncated ratio as w makes every coefficient 0, there is no drift to
subtract. The weight is inside: no further one belongs to it. Advantages are centred by their
group and not divided by its deviation.

The *value* of the loss means little where the head holds nearly all the mass (rho is a quotient
of two roundings then); the gradient is right, because the coefficients' share of the tail cancels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from correction.checks import (
    require_finite,
    require_floating,
    require_given,
    require_logprobs,
    require_mask,
    require_shape,
)
from correction.errors import InputError
from correction.masks import fill_masked
from correction.ratios import to_ratio, working_dtype
from correction.surrogates import TokenLosses

MIN_TAIL = 1e-6
"""Least probability outside of the head, so that a full head does not divide 0 by 0."""

MASS_SLACK = 1e-2
"""Logprobs kept in 16 bits may add up to a per cent above 1; an id listed twice to far more."""


class CenteredWeight(StrEnum):
    """Weight w(x) of a token at the ratio x = theta/mu, in the score and in its drift alike.

    none: 1. truncate: min(x, high). band: x if low <= x <= high, else 0.
    """

    NONE = "none"
    TRUNCATE = "truncate"
    BAND = "band"


@dataclass(frozen=True, slots=True)
class HeadMetrics:
    """What the head covered and what was subtracted; [B, T], detached, 0 where masked.

    behaviour_mass: mu(H). target_mass: theta(H). tail_ratio: rho. coefficient_l1: sum of |c_v|.
    """

    behaviour_mass: Tensor
    target_mass: Tensor
    tail_ratio: Tensor
    coefficient_l1: Tensor


@dataclass(frozen=True, slots=True)
class ScoreCentered:
    """Losses of the tokens, and the metrics of their heads."""

    token: TokenLosses
    head: HeadMetrics


def score_centered(
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    head_target_logprobs: Tensor | None,
    head_behaviour_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    weight: CenteredWeight,
    low: float,
    high: float,
) -> ScoreCentered:
    """Centred token losses [B, T] and head metrics. Formula: module docstring.

    target_logprobs: [B, T], log theta of the sampled ids, with gradient.
    behaviour_logprobs: [B, T], log mu of the sampled ids.
    head_target_logprobs: [B, T, K], log theta of the head's ids, with gradient.
    head_behaviour_logprobs: [B, T, K], log mu of the head's ids, normalised over the whole
        vocabulary and at the temperature of sampling. -inf marks an entry that is padding.
    advantages: [B, T], or [B, 1] for one a trajectory. mask: [B, T] bool.
    low, high: bounds on the ratio; `truncate` uses high, `band` both.

    The flags of the losses mark where the bound moved the sampled token's weight. What stands at
    masked places never matters. Raises InputError for missing heads, shapes, dtypes, logprobs that
    are not finite or above 0, and a head whose probabilities add up to more than 1.
    """
    require_mask("action_mask", mask)
    head_target = require_given("head_target_logprobs", head_target_logprobs, "Score Centering")
    head_behaviour = require_given(
        "head_behaviour_logprobs", head_behaviour_logprobs, "Score Centering"
    )
    _check(target_logprobs, behaviour_logprobs, advantages, mask)
    valid = _valid_head(head_target, head_behaviour, mask)

    dtype = working_dtype(target_logprobs, behaviour_logprobs, head_target, head_behaviour)
    target = fill_masked(target_logprobs.to(dtype), mask)
    behaviour = fill_masked(behaviour_logprobs.to(dtype), mask).detach()
    head_target = fill_masked(head_target.to(dtype), valid)
    head_behaviour = fill_masked(head_behaviour.to(dtype), valid).detach()

    ratio = to_ratio(target.detach() - behaviour)
    sampled_weight = _weigh(ratio, weight, low, high)
    coefficients, metrics = _drift(head_target.detach(), head_behaviour, valid, weight, low, high)
    score = sampled_weight * target - (coefficients * head_target).sum(dim=-1)
    spread = fill_masked(advantages.to(dtype).expand(mask.shape), mask)
    below, above = _moved(ratio, weight, low, high)
    never = torch.zeros_like(mask)
    token = TokenLosses(-spread * score, below & mask, above & mask, never)
    return ScoreCentered(token, _mask_metrics(metrics, mask))


def _weigh(ratio: Tensor, weight: CenteredWeight, low: float, high: float) -> Tensor:
    """w(ratio), any shape."""
    if weight is CenteredWeight.TRUNCATE:
        return ratio.clamp(max=high)
    if weight is CenteredWeight.BAND:
        return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    return torch.ones_like(ratio)


def _moved(ratio: Tensor, weight: CenteredWeight, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where the ratio lay below and above the bounds that `weight` has."""
    below, above = ratio < low, ratio > high
    if weight is not CenteredWeight.BAND:
        below = torch.zeros_like(below)
    if weight is CenteredWeight.NONE:
        above = torch.zeros_like(above)
    return below, above


def _drift(
    target: Tensor,
    behaviour: Tensor,
    valid: Tensor,
    weight: CenteredWeight,
    low: float,
    high: float,
) -> tuple[Tensor, HeadMetrics]:
    """Coefficients [B, T, K] from detached, filled head logprobs; 0 where not `valid`."""
    theta, mu = fill_masked(target.exp(), valid), fill_masked(behaviour.exp(), valid)
    target_mass, behaviour_mass = theta.sum(dim=-1), mu.sum(dim=-1)
    rho = (1.0 - behaviour_mass).clamp(min=MIN_TAIL) / (1.0 - target_mass).clamp(min=MIN_TAIL)
    alpha = rho * _weigh(1.0 / rho, weight, low, high)
    coefficients = mu * _weigh(to_ratio(target - behaviour), weight, low, high)
    coefficients = coefficients - alpha[..., None] * theta
    metrics = HeadMetrics(behaviour_mass, target_mass, rho, coefficients.abs().sum(dim=-1))
    return coefficients, metrics


def _mask_metrics(head: HeadMetrics, mask: Tensor) -> HeadMetrics:
    return HeadMetrics(
        fill_masked(head.behaviour_mass, mask),
        fill_masked(head.target_mass, mask),
        fill_masked(head.tail_ratio, mask),
        fill_masked(head.coefficient_l1, mask),
    )


def _check(target: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> None:
    require_logprobs("target_logprobs", target.detach(), mask)
    require_logprobs("behaviour_logprobs", behaviour.detach(), mask)
    require_floating("advantages", advantages)
    if tuple(advantages.shape) not in (tuple(mask.shape), (mask.shape[0], 1)):
        raise InputError(
            f"advantages: expected shape {list(mask.shape)} or {[mask.shape[0], 1]}, "
            f"got {list(advantages.shape)}"
        )
    require_finite("advantages", advantages.expand(mask.shape), mask)


def _valid_head(target: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """Entries [B, T, K] that are neither masked nor padding; both heads checked there."""
    require_floating("head_behaviour_logprobs", behaviour)
    if behaviour.dim() != 3:
        raise InputError(
            f"head_behaviour_logprobs: expected shape [B, T, K], got {list(behaviour.shape)}"
        )
    require_shape("head_behaviour_logprobs", behaviour, (*mask.shape, behaviour.shape[-1]))
    valid = mask[..., None] & (behaviour != -torch.inf)
    require_logprobs("head_behaviour_logprobs", behaviour.detach(), valid)
    require_logprobs("head_target_logprobs", target.detach(), valid)
    mass = fill_masked(behaviour.detach().exp(), valid).sum(dim=-1)
    if bool((mass > 1.0 + MASS_SLACK).any()):
        raise InputError(
            f"head_behaviour_logprobs: probabilities of one head add up to {float(mass.max())}; "
            "an id is listed twice or the head is not normalised over the whole vocabulary"
        )
    return valid
