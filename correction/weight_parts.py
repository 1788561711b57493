"""The weight slot: which ratio weighs the surrogate, at which level, under which bound.

The mathematics is in `ratios` and `bounds`. Weights are detached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from correction.bounds import Bound, BoundedWeight, bound_weight
from correction.checks import require_parameter
from correction.ratios import Level, at_level


@dataclass(frozen=True, slots=True)
class NoWeight:
    """Weight 1: nothing outside the surrogate corrects for the lag."""

    kind: ClassVar[str] = "none"
    level: ClassVar[Level] = Level.TOKEN

    def __call__(
        self, log_ratios: Tensor, mask: Tensor, turn_ids: Tensor, advantages: Tensor
    ) -> BoundedWeight:
        """Weights [B, T] of 1, whatever the ratios are."""
        return bound_weight(torch.zeros_like(log_ratios), Bound.NONE, low=0.0, high=1.0)


@dataclass(frozen=True, slots=True)
class ProximalBehaviourWeight:
    """Weight prox/mu at a level, bounded: the lag and the engine mismatch.

    low, high: bounds on the ratio itself; `truncate` uses high, `clip` and `band` use both.
    """

    level: Level = Level.TOKEN
    bound: Bound = Bound.TRUNCATE
    low: float = 0.5
    high: float = 2.0
    kind: ClassVar[str] = "proximal_behaviour"

    def __post_init__(self) -> None:
        # 1 lies within the bounds, so that on-policy data is never changed.
        require_parameter(0 <= self.low <= 1, "weight.low", "in [0, 1]", self.low)
        require_parameter(self.high >= 1, "weight.high", ">= 1", self.high)

    def __call__(
        self, log_ratios: Tensor, mask: Tensor, turn_ids: Tensor, advantages: Tensor
    ) -> BoundedWeight:
        """Bounded weights [B, T] from token log ratios [B, T] and advantages [B, T]."""
        level = at_level(log_ratios, mask, self.level, turn_ids)
        return bound_weight(level, self.bound, low=self.low, high=self.high, advantages=advantages)


@dataclass(frozen=True, slots=True)
class TargetBehaviourWeight(ProximalBehaviourWeight):
    """Weight theta/mu, detached: all the correction of a surrogate that holds no ratio."""

    kind: ClassVar[str] = "target_behaviour"


def without(weight: BoundedWeight, rejected: Mapping[str, Tensor]) -> BoundedWeight:
    """The weight, 0 where any rule rejects. rejected: bool [B, T] by rule."""
    if not rejected:
        return weight
    gone = torch.stack(list(rejected.values())).any(dim=0)
    return BoundedWeight(
        raw=weight.raw,
        weight=weight.weight.masked_fill(gone, 0.0),
        changed=weight.changed | gone,
        rejected=weight.rejected | gone,
    )
