"""The surrogate slot: losses as frozen values. The mathematics is in `surrogates`.

has_ratio: the surrogate holds theta/prox itself. whole_sequence: one decision a trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from correction import surrogates
from correction.checks import require_parameter
from correction.surrogates import TokenLosses


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """What a surrogate may look at; masked places are filled already.

    target_logprobs: [B, T] with gradient. log_ratios: [B, T] token log theta/prox, with gradient.
    advantages: [B, T]. mask: [B, T] bool, the original action mask.
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
            require_parameter(
                beyond, "surrogate.dual_clip", "0 (off) or > 1 + clip_high", self.dual_clip
            )

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


def _check_clip(clip_low: float, clip_high: float) -> None:
    require_parameter(0 < clip_low < 1, "surrogate.clip_low", "in (0, 1)", clip_low)
    require_parameter(clip_high > 0, "surrogate.clip_high", "> 0", clip_high)
