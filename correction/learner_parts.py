"""Slots that act beside the policy loss: the critic's loss, and control of the learning rate.

The mathematics is in `value_loss` and `reuse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from correction.checks import require_parameter
from correction.reuse import ess_learning_rate_factor
from correction.value_loss import ValueLosses, value_loss


@dataclass(frozen=True, slots=True)
class NoCritic:
    """Nobody estimates values."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, slots=True)
class ValueCritic:
    """A critic. coefficient: of its loss. clip: how far V may move from before the step; 0 = off.

    The clip needs values of before the step, which only `gae` has.
    """

    coefficient: float = 0.5
    clip: float = 0.2
    kind: ClassVar[str] = "value"

    def __post_init__(self) -> None:
        require_parameter(self.coefficient > 0, "critic.coefficient", "> 0", self.coefficient)
        require_parameter(self.clip >= 0, "critic.clip", ">= 0 (0 is off)", self.clip)

    def losses(
        self, values: Tensor, value_targets: Tensor, mask: Tensor, old_values: Tensor | None
    ) -> ValueLosses:
        """Losses [B, T] before the coefficient."""
        return value_loss(
            values, value_targets, mask, old_values=old_values, clip=self.clip or None
        )


@dataclass(frozen=True, slots=True)
class NoControl:
    """The learning rate is the schedule's."""

    kind: ClassVar[str] = "none"

    def learning_rate_factor(self, metrics: Mapping[str, float]) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True, slots=True)
class EssLearningRate:
    """Learning rate x min(1, ESS ratio / base_ratio)^power, of raw trajectory ratios (VCPO)."""

    base_ratio: float = 1.0
    power: float = 0.5
    kind: ClassVar[str] = "ess_learning_rate"

    def __post_init__(self) -> None:
        require_parameter(
            0 < self.base_ratio <= 1, "control.base_ratio", "in (0, 1]", self.base_ratio
        )
        require_parameter(self.power > 0, "control.power", "> 0", self.power)

    def learning_rate_factor(self, metrics: Mapping[str, float]) -> float:
        """Factor in (0, 1]. metrics: of `pooling.summarise`, of the whole batch."""
        return ess_learning_rate_factor(
            metrics.get("ess_ratio_trajectory_raw", 1.0),
            base_ratio=self.base_ratio,
            power=self.power,
        )
