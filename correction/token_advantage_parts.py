"""The advantage slot, one number a token: estimators as frozen values.

The mathematics is in `token_advantages`, `gae` and `vtrace`. V-trace is the one that depends on
the target policy itself: it is computed anew in every pass, from what `VTrace.trace` is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from correction import token_advantages
from correction.advantage_parts import Advantages
from correction.advantages import grpo_advantages, rloo_advantages
from correction.batch_view import BatchView
from correction.checks import require_parameter
from correction.errors import RecipeError
from correction.gae import gae
from correction.needs import Need
from correction.ratios import Level
from correction.steps import StepUnit
from correction.token_advantages import WhitenUnit
from correction.vtrace import VtraceEstimate, vtrace


@dataclass(frozen=True, slots=True)
class TokenAdvantage(ABC):
    """Base of the estimators that give each token a number."""

    kind: ClassVar[str]
    needs_group: ClassVar[bool] = False
    a_token: ClassVar[bool] = True
    experimental: ClassVar[str] = ""

    @property
    def needs(self) -> frozenset[Need]:
        """What the estimator cannot do without."""
        return frozenset()

    @abstractmethod
    def __call__(self, view: BatchView, token_rewards: Tensor) -> Advantages:
        """Advantages of a batch. token_rewards: [N, T], what the view's rewards are the sums of."""


@dataclass(frozen=True, slots=True)
class ReinforcePp(TokenAdvantage):
    """REINFORCE++: discounted returns, whitened over the batch's tokens."""

    gamma: float = 1.0
    std_ddof: int = 0
    kind: ClassVar[str] = "reinforce_pp"

    def __post_init__(self) -> None:
        _require_fraction("gamma", self.gamma)
        require_parameter(self.std_ddof in (0, 1), "advantage.std_ddof", "0 or 1", self.std_ddof)

    def __call__(self, view: BatchView, token_rewards: Tensor) -> Advantages:
        """Advantages [N, T] from token rewards [N, T]."""
        return Advantages(
            token_advantages.reinforce_pp_advantages(
                token_rewards, view.action_mask, gamma=self.gamma, std_ddof=self.std_ddof
            )
        )


@dataclass(frozen=True, slots=True)
class ReinforcePpBaseline(TokenAdvantage):
    """REINFORCE++ with the group's mean as the baseline, then whitened over the batch.

    unit: whether tokens or trajectories are whitened. recenter: whether the mean over the batch is
    taken off again; over tokens it is not 0, because answers differ in length.
    """

    unit: WhitenUnit = WhitenUnit.TOKEN
    recenter: bool = True
    std_ddof: int = 0
    kind: ClassVar[str] = "reinforce_pp_baseline"
    needs_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_parameter(self.std_ddof in (0, 1), "advantage.std_ddof", "0 or 1", self.std_ddof)

    def __call__(self, view: BatchView, token_rewards: Tensor) -> Advantages:
        """Advantages [N, T] from the rewards of the view."""
        return Advantages(
            token_advantages.reinforce_pp_baseline_advantages(
                view.rewards,
                view.group_index,
                view.action_mask,
                unit=self.unit,
                recenter=self.recenter,
                std_ddof=self.std_ddof,
            )
        )


@dataclass(frozen=True, slots=True)
class Gae(TokenAdvantage):
    """Generalised advantage estimation from a critic's values before the first step.

    unit: a step is a token or a turn. length_alpha: above 0, lambda = 1 - 1 / (length_alpha x
    steps of the trajectory) (VAPO) instead of gae_lambda. bootstrap_truncated: a cut episode goes
    on at the critic's value.
    """

    gamma: float = 1.0
    gae_lambda: float = 0.95
    length_alpha: float = 0.0
    unit: StepUnit = StepUnit.TOKEN
    bootstrap_truncated: bool = True
    kind: ClassVar[str] = "gae"

    def __post_init__(self) -> None:
        _require_fraction("gamma", self.gamma)
        _require_fraction("gae_lambda", self.gae_lambda)
        require_parameter(self.length_alpha >= 0, "advantage.length_alpha", ">= 0 (0 is off)",
                          self.length_alpha)  # fmt: skip

    @property
    def needs(self) -> frozenset[Need]:
        """Values of the whole batch before the first step."""
        return frozenset({Need.VALUES, Need.SCORES})

    def __call__(self, view: BatchView, token_rewards: Tensor) -> Advantages:
        """Advantages and value targets [N, T]."""
        result = gae(
            token_rewards,
            view.required("values", Need.VALUES),
            view.bootstrap(self.bootstrap_truncated),
            view.action_mask,
            view.turn_ids,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            unit=self.unit,
            length_alpha=self.length_alpha,
        )
        return Advantages(result.advantages, result.value_targets)


@dataclass(frozen=True, slots=True)
class Teacher(TokenAdvantage):
    """SRPO: what a teacher that has seen the outcome would have done rather, centred."""

    kind: ClassVar[str] = "teacher"

    @property
    def needs(self) -> frozenset[Need]:
        """The teacher's logprobs."""
        return frozenset({Need.TEACHER})

    def __call__(self, view: BatchView, token_rewards: Tensor) -> Advantages:
        """Advantages [N, T] from log teacher - log mu."""
        return Advantages(
            token_advantages.teacher_advantages(
                view.same_version_teacher(), view.behaviour_logprobs, view.action_mask
            )
        )


@dataclass(frozen=True, slots=True)
class SharedPrefix(TokenAdvantage):
    """ARPO, hard: tokens that branches share get the mean of the branches' GRPO advantages."""

    std_ddof: int = 0
    std_epsilon: float = 1e-6
    kind: ClassVar[str] = "shared_prefix"
    needs_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_parameter(self.std_ddof in (0, 1), "advantage.std_ddof", "0 or 1", self.std_ddof)

    @property
    def needs(self) -> frozenset[Need]:
        """Who shares what."""
        return frozenset({Need.SEGMENTS})

    def __call__(self, view: BatchView, token_rewards: Tensor) -> Advantages:
        """Advantages [N, T] from the rewards of the view."""
        whole = grpo_advantages(
            view.rewards, view.group_index, std_ddof=self.std_ddof, std_epsilon=self.std_epsilon
        )
        segments = view.required("segment_ids", Need.SEGMENTS)
        return Advantages(
            token_advantages.shared_prefix_advantages(whole, view.action_mask, segments)
        )


class ValueSource(StrEnum):
    """Where V-trace takes V from."""

    CRITIC = "critic"
    """A critic, at its newest values."""
    GROUP = "group"
    """The mean reward of the other members, constant over a trajectory: needs no critic."""


@dataclass(frozen=True, slots=True)
class VTrace(TokenAdvantage):
    """V-trace of IMPALA (arXiv 1802.01561): off-policy targets from clipped ratios theta/mu.

    unit: a step is a token, or a turn with the product or the geometric mean of its ratios.
    rho_bar, c_bar, pg_rho_bar: where the ratio is cut in the temporal difference, in the trace and
    in the policy gradient. The ratio is inside the advantage: no weight, no clip beside it.
    """

    gamma: float = 1.0
    trace_lambda: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0
    pg_rho_bar: float = 1.0
    unit: StepUnit = StepUnit.TURN
    turn_level: Level = Level.TURN_GEOMETRIC
    values: ValueSource = ValueSource.GROUP
    bootstrap_truncated: bool = True
    kind: ClassVar[str] = "vtrace"

    def __post_init__(self) -> None:
        _require_fraction("gamma", self.gamma)
        _require_fraction("trace_lambda", self.trace_lambda)
        require_parameter(self.c_bar > 0, "advantage.c_bar", "> 0", self.c_bar)
        require_parameter(self.pg_rho_bar > 0, "advantage.pg_rho_bar", "> 0", self.pg_rho_bar)
        require_parameter(self.rho_bar >= self.c_bar, "advantage.rho_bar", ">= c_bar", self.rho_bar)
        if self.turn_level not in (Level.TURN_PRODUCT, Level.TURN_GEOMETRIC):
            raise RecipeError(
                "correction.advantage.turn_level: turn_product or turn_geometric, got "
                f"{self.turn_level}"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """A critic's values, unless the group stands in for it."""
        return frozenset({Need.VALUES}) if self.values is ValueSource.CRITIC else frozenset()

    @property
    def needs_group(self) -> bool:  # type: ignore[override]
        """Whether V is the mean of the group."""
        return self.values is ValueSource.GROUP

    def __call__(self, view: BatchView, token_rewards: Tensor) -> Advantages:
        """The constant V of each trajectory where the group gives it; the rest is per pass."""
        if self.values is ValueSource.CRITIC:
            return Advantages(torch.zeros_like(view.rewards))
        centred = rloo_advantages(view.rewards, view.group_index)
        return Advantages(centred, baseline=view.rewards - centred)

    def trace(
        self,
        log_ratios: Tensor,
        token_rewards: Tensor,
        values: Tensor,
        bootstrap_values: Tensor,
        mask: Tensor,
        turn_ids: Tensor,
    ) -> VtraceEstimate:
        """Targets and policy-gradient advantages [B, T] under the present theta/mu [B, T]."""
        return vtrace(
            log_ratios,
            token_rewards,
            values,
            bootstrap_values,
            mask,
            turn_ids,
            gamma=self.gamma,
            trace_lambda=self.trace_lambda,
            rho_bar=self.rho_bar,
            c_bar=self.c_bar,
            pg_rho_bar=self.pg_rho_bar,
            unit=self.unit,
            turn_level=self.turn_level,
        )


def _require_fraction(name: str, value: float) -> None:
    require_parameter(0 <= value <= 1, f"advantage.{name}", "in [0, 1]", value)
