"""Bounds on an importance weight w: how much variance is traded for bias.

    none       w                              unbiased, unbounded variance
    truncate   min(w, high)                   truncated importance sampling
    clip       min(max(w, low), high)         two-sided
    band       w if low <= w <= high, else 0  masked importance sampling, IcePop

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

from correction.ratios import to_ratio


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
    log_weights: Tensor, bound: Bound, *, low: float, high: float, advantages=None
) -> BoundedWeight:
    """Bound exp(log_weights), any shape. `low` and `high` are bounds on the ratio, not on its log.

    Bounds are on pi / mu: a band of 0.5 to 5 keeps 4.0 and drops 0.25 (some implementations test
    the inverse ratio and drop 4.0).
    """
    raw = to_ratio(log_weights.detach())
    rejected = torch.zeros_like(raw, dtype=torch.bool)
    if bound is Bound.TRUNCATE:
        weight = raw.clamp(max=high)
    elif bound is Bound.CLIP:
        weight = raw.clamp(low, high)
    elif bound is Bound.BAND:
        rejected = (raw < low) | (raw > high)
        weight = torch.where(rejected, torch.zeros_like(raw), raw)
    else:
        weight = raw
    return BoundedWeight(raw, weight, weight != raw, rejected)
