"""The advantage slot, one number a trajectory: estimators as frozen values.

The mathematics is in `advantages`, `tail_advantages`, `optimal_baseline` and `reco`. Estimators
with a number a token: `token_advantage_parts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from torch import Tensor

from correction import advantages
from correction.batch_view import BatchView
from correction.checks import require_parameter
from correction.masks import masked_sum
from correction.needs import Need
from correction.optimal_baseline import opob_advantages
from correction.ratios import log_ratio, to_ratio
from correction.reco import SECONDARY_SOURCE, reco_weights
from correction.tail_advantages import maxrl_advantages, tail_advantages


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What an estimator makes of a batch.

    values: [N], or [N, T] with 0 where masked. value_targets: [N, T] for the critic's loss.
    baseline: [N], a constant V of each trajectory for an estimator that is computed every pass.
    """

    values: Tensor
    value_targets: Tensor | None = None
    baseline: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryAdvantage(ABC):
    """Base of the estimators that give each trajectory one number."""

    kind: ClassVar[str]
    needs_group: ClassVar[bool] = True
    a_token: ClassVar[bool] = False
    experimental: ClassVar[str] = ""
    needs: ClassVar[frozenset[Need]] = frozenset()

    @abstractmethod
    def of_rewards(self, view: BatchView) -> Tensor:
        """Advantages [N] of the view's rewards [N]."""

    def __call__(self, view: BatchView, token_rewards: Tensor) -> Advantages:
        """Advantages of a batch. token_rewards: [N, T], what the view's rewards are the sums of."""
        return Advantages(self.of_rewards(view))


@dataclass(frozen=True, slots=True)
class Return(TrajectoryAdvantage):
    """The reward itself as the advantage."""

    kind: ClassVar[str] = "return"
    needs_group: ClassVar[bool] = False

    def of_rewards(self, view: BatchView) -> Tensor:
        """The rewards; the group is not looked at."""
        return advantages.return_advantages(view.rewards)


@dataclass(frozen=True, slots=True)
class Baseline(TrajectoryAdvantage):
    """Reward minus a constant."""

    value: float = 0.5
    kind: ClassVar[str] = "baseline"
    needs_group: ClassVar[bool] = False

    def of_rewards(self, view: BatchView) -> Tensor:
        """Rewards minus `value`."""
        return advantages.baseline_advantages(view.rewards, baseline=self.value)


@dataclass(frozen=True, slots=True)
class Rloo(TrajectoryAdvantage):
    """Leave-one-out baseline."""

    kind: ClassVar[str] = "rloo"

    def of_rewards(self, view: BatchView) -> Tensor:
        """Rewards minus the mean of the other members."""
        return advantages.rloo_advantages(view.rewards, view.group_index)


@dataclass(frozen=True, slots=True)
class DrGrpo(TrajectoryAdvantage):
    """Group mean as the baseline, no division by the deviation."""

    kind: ClassVar[str] = "dr_grpo"

    def of_rewards(self, view: BatchView) -> Tensor:
        """Rewards minus the mean of the group."""
        return advantages.dr_grpo_advantages(view.rewards, view.group_index)


@dataclass(frozen=True, slots=True)
class Grpo(TrajectoryAdvantage):
    """Group mean and standard deviation; parameters as in `advantages.grpo_advantages`."""

    std_ddof: int = 0
    std_epsilon: float = 1e-6
    kind: ClassVar[str] = "grpo"

    def __post_init__(self) -> None:
        require_parameter(self.std_ddof in (0, 1), "advantage.std_ddof", "0 or 1", self.std_ddof)
        require_parameter(
            0 <= self.std_epsilon <= 1, "advantage.std_epsilon", "in [0, 1]", self.std_epsilon
        )

    def of_rewards(self, view: BatchView) -> Tensor:
        """Centred rewards over the group's deviation."""
        return advantages.grpo_advantages(
            view.rewards, view.group_index, std_ddof=self.std_ddof, std_epsilon=self.std_epsilon
        )


@dataclass(frozen=True, slots=True)
class Reco(Grpo):
    """GRPO's advantage times ReCo's weight of rare answers. Experimental: secondary source."""

    max_weight: float = 5.0
    kind: ClassVar[str] = "reco"
    experimental: ClassVar[str] = SECONDARY_SOURCE

    def __post_init__(self) -> None:
        Grpo.__post_init__(self)
        require_parameter(self.max_weight > 0, "advantage.max_weight", "> 0", self.max_weight)

    def of_rewards(self, view: BatchView) -> Tensor:
        """Centred rewards over the deviation, times w / (mean w of the group)."""
        rare = reco_weights(
            view.behaviour_logprobs,
            view.action_mask,
            view.group_index,
            max_weight=self.max_weight,
        )
        return Grpo.of_rewards(self, view) * rare.to(view.rewards.dtype)


@dataclass(frozen=True, slots=True)
class Tail(TrajectoryAdvantage):
    """TailRL: rare high rewards count more. by_group_size: times G, as the paper's estimator."""

    by_group_size: bool = True
    kind: ClassVar[str] = "tail"

    def of_rewards(self, view: BatchView) -> Tensor:
        """Tail likelihood estimates, centred."""
        return tail_advantages(
            view.rewards, view.group_index, scale_by_group_size=self.by_group_size
        )


@dataclass(frozen=True, slots=True)
class MaxRl(TrajectoryAdvantage):
    """Maximum likelihood of success, for rewards of 0 and 1."""

    kind: ClassVar[str] = "maxrl"

    def of_rewards(self, view: BatchView) -> Tensor:
        """(G - C) / C for each of C successes, -1 for a failure."""
        return maxrl_advantages(view.rewards, view.group_index)


class GradientNorm(StrEnum):
    """Stand-in for the squared norm of a trajectory's score in the optimal baseline."""

    LENGTH = "length"
    """Its sampled tokens: their scores taken as orthogonal and of one size (2505.23585)."""
    UNIFORM = "uniform"
    """1: the weights alone."""


@dataclass(frozen=True, slots=True)
class Opob(TrajectoryAdvantage):
    """Off-policy optimal baseline of VCPO, with a stand-in for the gradient norms.

    max_weight: bound on the trajectory's ratio learner/mu, as the loss bounds it.
    """

    max_weight: float = 8.0
    norm: GradientNorm = GradientNorm.LENGTH
    kind: ClassVar[str] = "opob"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SCORES})

    def __post_init__(self) -> None:
        require_parameter(self.max_weight >= 1, "advantage.max_weight", ">= 1", self.max_weight)

    def of_rewards(self, view: BatchView) -> Tensor:
        """Rewards minus the baseline of least variance under the weights."""
        scores = view.required("scores", Need.SCORES)
        logs = log_ratio(scores, view.behaviour_logprobs, view.action_mask)
        weights = to_ratio(masked_sum(logs, view.action_mask)).clamp(max=self.max_weight)
        norms = view.action_counts.to(weights.dtype)
        if self.norm is GradientNorm.UNIFORM:
            norms = norms.clamp(max=1)
        return opob_advantages(view.rewards, view.group_index, weights, norms)
