"""The parts a recipe is made of, as frozen values: what a config names and may override.

    slot         kinds
    advantage    return, rloo, grpo, dr_grpo
    proximal     recompute, behaviour
    weight       none, proximal_behaviour, target_behaviour
    surrogate    ppo_clip, gspo, reinforce
    aggregation  token_mean, sequence_mean_token_mean, ...

A part holds parameters and calls the pure function that its module documents; the mathematics is
there, not here. A new method is a function in its module and a part in `PARTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from correction import advantages, surrogates
from correction.aggregation import Aggregation
from correction.bounds import Bound, BoundedWeight, bound_weight
from correction.errors import RecipeError
from correction.proximal import Proximal
from correction.ratios import Level, at_level
from correction.surrogates import TokenLosses


def _check_clip(clip_low: float, clip_high: float) -> None:
    _require(0 < clip_low < 1, "surrogate.clip_low", "in (0, 1)", clip_low)
    _require(clip_high > 0, "surrogate.clip_high", "> 0", clip_high)


def _require(holds: bool, key: str, rule: str, value: float) -> None:
    if not holds:
        raise RecipeError(f"{key}: must be {rule}, got {value}")


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
        if self.std_ddof not in (0, 1):
            raise RecipeError(f"advantage.std_ddof: must be 0 or 1, got {self.std_ddof}")
        _require(self.std_epsilon >= 0, "advantage.std_epsilon", ">= 0", self.std_epsilon)

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Advantages [N] from rewards [N] and group_index [N]."""
        return advantages.grpo_advantages(
            rewards, group_index, std_ddof=self.std_ddof, std_epsilon=self.std_epsilon
        )


@dataclass(frozen=True, slots=True)
class NoWeight:
    """Weight 1: nothing outside the surrogate corrects for the lag."""

    kind: ClassVar[str] = "none"
    level: ClassVar[Level] = Level.TOKEN

    def __call__(self, log_ratios: Tensor, mask: Tensor, turn_ids: Tensor) -> BoundedWeight:
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
        _require(self.low >= 0, "weight.low", ">= 0", self.low)
        _require(self.high >= max(self.low, 1.0), "weight.high", ">= 1 and >= low", self.high)
        _require(self.low <= 1, "weight.low", "<= 1, else on-policy data is changed", self.low)

    def __call__(self, log_ratios: Tensor, mask: Tensor, turn_ids: Tensor) -> BoundedWeight:
        """Bounded weights [B, T] from token log ratios [B, T]."""
        level = at_level(log_ratios, mask, self.level, turn_ids)
        return bound_weight(level, self.bound, low=self.low, high=self.high)


@dataclass(frozen=True, slots=True)
class TargetBehaviourWeight(ProximalBehaviourWeight):
    """Weight theta/mu, detached: all the correction of a surrogate that holds no ratio."""

    kind: ClassVar[str] = "target_behaviour"


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """What a surrogate may look at; masked places are filled already.

    target_logprobs: [B, T] with gradient. log_ratios: [B, T] token log theta/prox, with gradient.
    advantages: [B]. mask: [B, T] bool, the original action mask.
    """

    target_logprobs: Tensor
    log_ratios: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PpoClip:
    """Token-level clip. dual_clip: largest ratio that counts for a negative advantage, 0 = off."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kind: ClassVar[str] = "ppo_clip"
    has_ratio: ClassVar[bool] = True
    whole_sequence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        if self.dual_clip != 0:
            beyond = self.dual_clip > 1 + self.clip_high
            _require(beyond, "surrogate.dual_clip", "0 (off) or > 1 + clip_high", self.dual_clip)

    def __call__(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T]."""
        return surrogates.ppo_clip(
            inputs.log_ratios,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


@dataclass(frozen=True, slots=True)
class Gspo:
    """One clip decision a trajectory, on its geometric ratio; bounds of the paper."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    kind: ClassVar[str] = "gspo"
    has_ratio: ClassVar[bool] = True
    whole_sequence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)

    def __call__(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T], equal within a trajectory."""
        return surrogates.gspo(
            inputs.log_ratios,
            inputs.mask,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )


@dataclass(frozen=True, slots=True)
class Reinforce:
    """The plain policy gradient; no ratio inside."""

    kind: ClassVar[str] = "reinforce"
    has_ratio: ClassVar[bool] = False
    whole_sequence: ClassVar[bool] = False

    def __call__(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T]."""
        return surrogates.reinforce(inputs.target_logprobs, inputs.advantages)


Advantage: TypeAlias = Return | Rloo | Grpo | DrGrpo
Weight: TypeAlias = NoWeight | ProximalBehaviourWeight | TargetBehaviourWeight
Surrogate: TypeAlias = PpoClip | Gspo | Reinforce
Part: TypeAlias = Advantage | Proximal | Weight | Surrogate | Aggregation

_OBJECTS: tuple[tuple[str, tuple[Advantage | Weight | Surrogate, ...]], ...] = (
    ("advantage", (Return(), Rloo(), Grpo(), DrGrpo())),
    ("weight", (NoWeight(), ProximalBehaviourWeight(), TargetBehaviourWeight())),
    ("surrogate", (PpoClip(), Gspo(), Reinforce())),
)
PARTS: Mapping[str, Mapping[str, Part]] = {
    **{slot: {part.kind: part for part in parts} for slot, parts in _OBJECTS},
    "proximal": {part.value: part for part in Proximal},
    "aggregation": {part.value: part for part in Aggregation},
}
"""Every slot's kinds, by name, with their default parameters."""
