"""Bounds on an importance weight w: how much variance is traded for bias.

    none       w                              unbiased, unbounded variance
    truncate   min(w, high)                   truncated importance sampling
    clip       min(max(w, low), high)         two-sided
    band       w if low <= w <= high, else 0  masked importance sampling, IcePop
    topr       1 if A > 0, else min(w, 1)     arXiv 2503.14286, w of the trajectory
    vespo      w^k e^(lambda (1 - w))         arXiv 2602.10693, w of the trajectory

topr and vespo look at the sign of the advantage. topr: what was good is imitated from whatever
policy; what was bad is pushed down only as far as the policy still does it. vespo: smooth, 1 at
w = 1, largest at w = k / lambda, gone on both sides: k, lambda = 2, 3 for A >= 0 and 3, 2 below.

A weight is a number, not a path for the gradient: it is detached here. A token outside the band
is *rejected*: its weight is 0 and the loss's denominator stays, so that a rejection never
enlarges the step of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from correction.checks import require_floating, require_given, require_shape
from correction.ratios import MAX_LOG_RATIO, to_ratio


class Bound(StrEnum):
    """Rule that bounds a weight. Formulas: module docstring."""

    NONE = "none"
    TRUNCATE = "truncate"
    CLIP = "clip"
    BAND = "band"
    TOPR = "topr"
    VESPO = "vespo"


BOUND_PARAMETERS: Mapping[Bound, frozenset[str]] = {
    Bound.NONE: frozenset(),
    Bound.TRUNCATE: frozenset({"high"}),
    Bound.CLIP: frozenset({"low", "high"}),
    Bound.BAND: frozenset({"low", "high"}),
    Bound.TOPR: frozenset(),
    Bound.VESPO: frozenset(),
}
"""Which of `low` and `high` a rule looks at."""

SIGNED_BOUNDS: frozenset[Bound] = frozenset({Bound.TOPR, Bound.VESPO})
"""Rules that need the advantages."""


@dataclass(frozen=True, slots=True)
class GammaShape:
    """phi(w) = w^power e^(rate (1 - w)): a gamma density in w, scaled to phi(1) = 1.

    power: k, how fast it vanishes towards 0. rate: lambda, how fast towards infinity. Both > 0.
    """

    power: float
    rate: float


VESPO_POSITIVE = GammaShape(power=2.0, rate=3.0)
"""For advantages of 0 and above: the largest weight, at w = 2/3, is 1.21."""

VESPO_NEGATIVE = GammaShape(power=3.0, rate=2.0)
"""For negative advantages: the largest weight, at w = 3/2, is 1.24."""


@dataclass(frozen=True, slots=True)
class BoundedWeight:
    """Weights before and after the bound; all detached, of one shape.

    raw: w itself. weight: what multiplies the loss. changed: bool, the bound moved w (rejection
    included). rejected: bool, the weight was set to 0.
    """

    raw: Tensor
    weight: Tensor
    changed: Tensor
    rejected: Tensor


def bound_weight(
    log_weights: Tensor,
    bound: Bound,
    *,
    low: float,
    high: float,
    advantages: Tensor | None = None,
) -> BoundedWeight:
    """Bound exp(log_weights), any shape. `low` and `high` are bounds on the ratio, not on its log.

    Bounds are on pi / mu: a band of 0.5 to 5 keeps 4.0 and drops 0.25 (some implementations test
    the inverse ratio and drop 4.0).

    advantages: floating, of the shape of log_weights, one sign a trajectory where the weight is
    the trajectory's; looked at under SIGNED_BOUNDS only, where InputError is raised if they are
    missing or of another shape or dtype.
    """
    raw = to_ratio(log_weights.detach())
    rejected = torch.zeros_like(raw, dtype=torch.bool)
    if bound in SIGNED_BOUNDS:
        weight = _signed_weight(log_weights.detach(), bound, advantages)
    elif bound is Bound.TRUNCATE:
        weight = raw.clamp(max=high)
    elif bound is Bound.CLIP:
        weight = raw.clamp(low, high)
    elif bound is Bound.BAND:
        rejected = (raw < low) | (raw > high)
        weight = torch.where(rejected, torch.zeros_like(raw), raw)
    else:
        weight = raw
    return BoundedWeight(raw, weight, weight != raw, rejected)


def _signed_weight(log_weights: Tensor, bound: Bound, advantages: Tensor | None) -> Tensor:
    given = require_given("advantages", advantages, f"bound = {bound}")
    require_floating("advantages", given)
    require_shape("advantages", given, tuple(log_weights.shape))
    if bound is Bound.TOPR:
        ratio = to_ratio(log_weights)
        return torch.where(given > 0, torch.ones_like(ratio), ratio.clamp(max=1.0))
    return _gamma_weight(log_weights, given >= 0)


def _gamma_weight(log_weights: Tensor, positive: Tensor) -> Tensor:
    """phi, from its log: w^k alone would overflow float32 where the product is 0."""
    logs = log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    power = torch.where(positive, VESPO_POSITIVE.power, VESPO_NEGATIVE.power).to(logs.dtype)
    rate = torch.where(positive, VESPO_POSITIVE.rate, VESPO_NEGATIVE.rate).to(logs.dtype)
    return (power * logs - rate * torch.expm1(logs)).exp()
