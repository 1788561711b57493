"""The advantage slot: estimators as frozen values. The mathematics is in `advantages`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from correction import advantages
from correction.checks import require_parameter


@dataclass(frozen=True, slots=True)
class Return:
    """The reward itself as the advantage."""

    kind: ClassVar[str] = "return"
    needs_group: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Advantages [N] from rewards [N]; the group is not looked at."""
        return advantages.return_advantages(rewards)


@dataclass(frozen=True, slots=True)
class Rloo:
    """Leave-one-out baseline."""

    kind: ClassVar[str] = "rloo"
    needs_group: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Advantages [N] from rewards [N] and group_index [N]."""
        return advantages.rloo_advantages(rewards, group_index)


@dataclass(frozen=True, slots=True)
class DrGrpo:
    """Group mean as the baseline, no division by the deviation."""

    kind: ClassVar[str] = "dr_grpo"
    needs_group: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Advantages [N] from rewards [N] and group_index [N]."""
        return advantages.dr_grpo_advantages(rewards, group_index)


@dataclass(frozen=True, slots=True)
class Grpo:
    """Group mean and standard deviation; parameters as in `advantages.grpo_advantages`."""

    std_ddof: int = 0
    std_epsilon: float = 1e-6
    kind: ClassVar[str] = "grpo"
    needs_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_parameter(self.std_ddof in (0, 1), "advantage.std_ddof", "0 or 1", self.std_ddof)
        require_parameter(
            0 <= self.std_epsilon <= 1, "advantage.std_epsilon", "in [0, 1]", self.std_epsilon
        )

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Advantages [N] from rewards [N] and group_index [N]."""
        return advantages.grpo_advantages(
            rewards, group_index, std_ddof=self.std_ddof, std_epsilon=self.std_epsilon
        )
