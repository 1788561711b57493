"""The trust slot: which tokens and trajectories are believed at all. Masks are AND-composed.

The mathematics is in `trust`. A rejected token has weight 0 and stays in the denominator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from correction import trust
from correction.checks import require_parameter
from correction.trust import LagUnit, Reduction


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrustInputs:
    """What a mask may look at; all [B, T] and detached, masked places filled.

    to_behaviour: log learner/mu, the learner before the first step where it was scored.
    target_to_behaviour: log theta/mu now.
    """

    to_behaviour: Tensor
    target_to_behaviour: Tensor
    target_logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    lag_versions: Tensor


@dataclass(frozen=True, slots=True)
class TrustMask(ABC):
    """Base of the masks. whole_batch: decided once, over all of the batch before any step."""

    kind: ClassVar[str]
    whole_batch: ClassVar[bool] = False

    @property
    def whole_trajectory(self) -> bool:
        """Whether trajectories are kept or rejected as a whole, never single tokens."""
        return False

    @abstractmethod
    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T], true where the token is kept."""


@dataclass(frozen=True, slots=True)
class _OfTrajectories(TrustMask):
    """A mask that keeps or rejects trajectories as a whole."""

    @property
    def whole_trajectory(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True, slots=True)
class _Limited(TrustMask):
    """A mask that rejects what is over a limit above 0."""

    limit: float

    def __post_init__(self) -> None:
        _require(self.kind, "limit", self.limit > 0, "> 0", self.limit)


@dataclass(frozen=True, slots=True)
class MaxLag(TrustMask):
    """Rejects what lags by more than max_lag_versions, below what the run admits."""

    max_lag_versions: int = 4
    unit: LagUnit = LagUnit.TOKEN
    kind: ClassVar[str] = "max_lag"

    @property
    def whole_trajectory(self) -> bool:
        """By its unit."""
        return self.unit is LagUnit.TRAJECTORY

    def __post_init__(self) -> None:
        _require("max_lag", "max_lag_versions", self.max_lag_versions >= 0, ">= 0",
                 self.max_lag_versions)  # fmt: skip

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T]."""
        return trust.within_lag(
            inputs.lag_versions,
            inputs.mask,
            max_lag_versions=self.max_lag_versions,
            unit=self.unit,
        )


@dataclass(frozen=True, slots=True)
class GeometricBand(_OfTrajectories):
    """Rejects a trajectory whose geometric mean of learner/mu leaves [low, high]."""

    low: float = 0.999
    high: float = 1.001
    kind: ClassVar[str] = "geometric_band"

    def __post_init__(self) -> None:
        _require(self.kind, "low", 0 <= self.low <= 1, "in [0, 1]", self.low)
        _require(self.kind, "high", self.high >= 1, ">= 1", self.high)

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T], equal within a trajectory."""
        return trust.geometric_band(inputs.to_behaviour, inputs.mask, low=self.low, high=self.high)


@dataclass(frozen=True, slots=True)
class K3Limit(_Limited, _OfTrajectories):
    """Rejects a trajectory whose k3 of mu and the learner, mean, sum or largest, is over limit."""

    limit: float = 0.01
    reduction: Reduction = Reduction.MEAN
    kind: ClassVar[str] = "k3_limit"

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T], equal within a trajectory."""
        return trust.k3_limit(
            inputs.to_behaviour, inputs.mask, limit=self.limit, reduction=self.reduction
        )


@dataclass(frozen=True, slots=True)
class Trm(_Limited, _OfTrajectories):
    """Trust-region masking: rejects a trajectory if any token's k3 is over limit."""

    limit: float = 0.1
    kind: ClassVar[str] = "trm"

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T], equal within a trajectory."""
        return trust.k3_limit(
            inputs.to_behaviour, inputs.mask, limit=self.limit, reduction=Reduction.MAX
        )


@dataclass(frozen=True, slots=True)
class Veto(_OfTrajectories):
    """Rejects a trajectory if any token's learner/mu is below low."""

    low: float = 1e-4
    kind: ClassVar[str] = "veto"

    def __post_init__(self) -> None:
        _require(self.kind, "low", 0 < self.low < 1, "in (0, 1)", self.low)

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T], equal within a trajectory."""
        return trust.veto(inputs.to_behaviour, inputs.mask, low=self.low)


@dataclass(frozen=True, slots=True)
class DppoTv(TrustMask):
    """Rejects a token whose probability has already moved too far in the wanted direction."""

    low: float = 0.2
    high: float = 0.2
    kind: ClassVar[str] = "dppo_tv"

    def __post_init__(self) -> None:
        _require(self.kind, "low", self.low > 0, "> 0", self.low)
        _require(self.kind, "high", self.high > 0, "> 0", self.high)

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T]."""
        return trust.dppo_tv(
            inputs.target_logprobs,
            inputs.behaviour_logprobs,
            inputs.advantages,
            inputs.mask,
            low=self.low,
            high=self.high,
        )


@dataclass(frozen=True, slots=True)
class DppoKl(_Limited):
    """The same by the binary KL divergence of mu and theta on the sampled token."""

    limit: float = 0.05
    kind: ClassVar[str] = "dppo_kl"

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T]."""
        return trust.dppo_kl(
            inputs.target_logprobs,
            inputs.behaviour_logprobs,
            inputs.advantages,
            inputs.mask,
            limit=self.limit,
        )


@dataclass(frozen=True, slots=True)
class Kpop(_Limited):
    """Rejects a token whose binary KL of theta and mu, in the larger direction, is over limit."""

    limit: float = 2.0
    kind: ClassVar[str] = "kpop"

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T]."""
        return trust.kpop(
            inputs.target_logprobs, inputs.behaviour_logprobs, inputs.mask, limit=self.limit
        )


@dataclass(frozen=True, slots=True)
class SecondMoment(_Limited):
    """M2PO: rejects the largest log ratios of the batch until their second moment is below."""

    limit: float = 0.04
    kind: ClassVar[str] = "m2"
    whole_batch: ClassVar[bool] = True

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [N, T]."""
        return trust.second_moment(inputs.to_behaviour, inputs.mask, limit=self.limit)


@dataclass(frozen=True, slots=True)
class Opsm(_Limited, _OfTrajectories):
    """Rejects a failed trajectory that theta has left behind: mean log mu/theta over limit."""

    limit: float = 0.5
    kind: ClassVar[str] = "opsm"

    def __call__(self, inputs: TrustInputs) -> Tensor:
        """Bool [B, T], equal within a trajectory."""
        return trust.opsm(
            inputs.target_to_behaviour, inputs.advantages, inputs.mask, limit=self.limit
        )


def _require(kind: str, name: str, holds: bool, rule: str, value: float) -> None:
    require_parameter(holds, f"trust.{kind}.{name}", rule, value)
