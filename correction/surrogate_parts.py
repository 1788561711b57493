"""The surrogate slot: losses as frozen values. The mathematics is in `surrogates` and beside it.

has_ratio: the surrogate holds theta/prox itself. whole_sequence: one decision a trajectory.
own_weight: theta/mu acts inside, a weight beside it would count it twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from correction import surrogates
from correction.batch_view import BatchView
from correction.checks import require_given, require_parameter
from correction.group_ratio import group_log_ratio, log_group_expectation
from correction.needs import Need
from correction.reco import SECONDARY_SOURCE, reco_clip
from correction.score_centering import CenteredWeight, score_centered
from correction.surrogates import TokenLosses


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SurrogateInputs:
    """What a surrogate may look at; masked places are filled already.

    target_logprobs: [B, T] with gradient. anchor_logprobs: [B, T], log prox. behaviour_logprobs:
    [B, T]. log_ratios: [B, T] token log theta/prox, with gradient. advantages: [B, T]. mask: [B, T]
    bool, the original action mask. log_expectation: [B], of the group, for `gepo`.
    head_target_logprobs, head_behaviour_logprobs: [B, T, K], for `score_centered`.
    """

    target_logprobs: Tensor
    anchor_logprobs: Tensor
    behaviour_logprobs: Tensor
    log_ratios: Tensor
    advantages: Tensor
    mask: Tensor
    log_expectation: Tensor | None = None
    head_target_logprobs: Tensor | None = None
    head_behaviour_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PolicySurrogate(ABC):
    """Base of the surrogates: what each says about itself."""

    kind: ClassVar[str]
    has_ratio: ClassVar[bool] = False
    whole_sequence: ClassVar[bool] = False
    own_weight: ClassVar[bool] = False
    uses_advantages: ClassVar[bool] = True
    needs_group: ClassVar[bool] = False
    experimental: ClassVar[str] = ""
    needs: ClassVar[frozenset[Need]] = frozenset()

    @property
    def head_tokens(self) -> int:
        """How many of the engine's likeliest tokens are needed at each place."""
        return 0

    def prepare(self, view: BatchView) -> Tensor | None:
        """One number a trajectory [N] that needs the whole batch, if any."""
        return None

    @abstractmethod
    def __call__(self, inputs: SurrogateInputs) -> tuple[TokenLosses, Mapping[str, Tensor]]:
        """Token losses [B, T], and figures of each token [B, T] by name, for the metrics."""


@dataclass(frozen=True, slots=True)
class _Plain(PolicySurrogate):
    """A surrogate that has nothing to tell but its losses."""

    @abstractmethod
    def losses(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T]."""

    def __call__(self, inputs: SurrogateInputs) -> tuple[TokenLosses, Mapping[str, Tensor]]:
        """Token losses [B, T], and no figures."""
        return self.losses(inputs), {}


@dataclass(frozen=True, slots=True)
class _Clipped(_Plain):
    """clip_low, clip_high: how far below and above 1 the ratio counts."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    has_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_parameter(0 < self.clip_low < 1, "surrogate.clip_low", "in (0, 1)", self.clip_low)
        require_parameter(self.clip_high > 0, "surrogate.clip_high", "> 0", self.clip_high)


@dataclass(frozen=True, slots=True)
class PpoClip(_Clipped):
    """Token-level clip. dual_clip: largest ratio that counts for a negative advantage, 0 = off."""

    dual_clip: float = 3.0
    kind: ClassVar[str] = "ppo_clip"

    def __post_init__(self) -> None:
        _Clipped.__post_init__(self)
        if self.dual_clip != 0:
            beyond = self.dual_clip > 1 + self.clip_high
            require_parameter(
                beyond, "surrogate.dual_clip", "0 (off) or > 1 + clip_high", self.dual_clip
            )

    def losses(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T]."""
        return surrogates.ppo_clip(
            inputs.log_ratios,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


@dataclass(frozen=True, slots=True)
class Gspo(_Clipped):
    """One clip decision a trajectory, on its geometric ratio; bounds of the paper."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    kind: ClassVar[str] = "gspo"
    whole_sequence: ClassVar[bool] = True

    def losses(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T], equal within a trajectory."""
        return surrogates.gspo(
            inputs.log_ratios,
            inputs.mask,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )


@dataclass(frozen=True, slots=True)
class Gepo(_Clipped):
    """GSPO's clip on theta over the group's expectation of mu: one denominator for all."""

    kind: ClassVar[str] = "gepo"
    needs_group: ClassVar[bool] = True
    has_ratio: ClassVar[bool] = False
    whole_sequence: ClassVar[bool] = True
    own_weight: ClassVar[bool] = True

    def prepare(self, view: BatchView) -> Tensor | None:
        """log E_q[q] of each trajectory's group: [N]."""
        return log_group_expectation(view.behaviour_logprobs, view.action_mask, view.group_index)

    def losses(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T], equal within a trajectory."""
        expectation = require_given("log_expectation", inputs.log_expectation, "gepo")
        ratios = group_log_ratio(inputs.target_logprobs, inputs.mask, expectation)
        return surrogates.ppo_clip(
            ratios, inputs.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )


@dataclass(frozen=True, slots=True)
class Cispo(_Plain):
    """Clipped ratio as a weight, so that clipped tokens keep their gradient.

    clip_low of 1 and more is no lower bound. The upper bound is 1 + clip_high.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    kind: ClassVar[str] = "cispo"
    has_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_parameter(self.clip_low > 0, "surrogate.clip_low", "> 0", self.clip_low)
        require_parameter(self.clip_high > 0, "surrogate.clip_high", "> 0", self.clip_high)

    def losses(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T]."""
        return surrogates.cispo(
            inputs.log_ratios,
            inputs.target_logprobs,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )


@dataclass(frozen=True, slots=True)
class Sapo(_Plain):
    """A soft gate in place of the clip. temperature_*: of the sigmoid, by sign of advantage."""

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    kind: ClassVar[str] = "sapo"
    has_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("temperature_positive", "temperature_negative"):
            require_parameter(getattr(self, name) > 0, f"surrogate.{name}", "> 0",
                              getattr(self, name))  # fmt: skip

    def losses(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T]."""
        return surrogates.sapo(
            inputs.log_ratios,
            inputs.advantages,
            temperature_positive=self.temperature_positive,
            temperature_negative=self.temperature_negative,
        )


@dataclass(frozen=True, slots=True)
class Reinforce(_Plain):
    """The plain policy gradient; no ratio inside. With V-trace advantages: V-trace's."""

    kind: ClassVar[str] = "reinforce"

    def losses(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T]."""
        return surrogates.reinforce(inputs.target_logprobs, inputs.advantages)


@dataclass(frozen=True, slots=True)
class RecoClip(_Clipped):
    """PPO's clip on the ratio of variances p (1 - p). Experimental: secondary source."""

    probability_floor: float = 1e-5
    kind: ClassVar[str] = "reco_clip"
    experimental: ClassVar[str] = SECONDARY_SOURCE

    def __post_init__(self) -> None:
        _Clipped.__post_init__(self)
        require_parameter(
            0 < self.probability_floor < 0.5,
            "surrogate.probability_floor",
            "in (0, 0.5)",
            self.probability_floor,
        )

    def losses(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T]."""
        return reco_clip(
            inputs.target_logprobs,
            inputs.anchor_logprobs,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            probability_floor=self.probability_floor,
        )


@dataclass(frozen=True, slots=True)
class ScoreCentered(PolicySurrogate):
    """The policy gradient with the sampler's drift taken off, from its `head` likeliest tokens.

    weight: theta/mu of a token as none, truncate (high) or band (low, high).
    """

    head: int = 128
    weight: CenteredWeight = CenteredWeight.TRUNCATE
    low: float = 0.5
    high: float = 2.0
    kind: ClassVar[str] = "score_centered"
    own_weight: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.HEAD})

    def __post_init__(self) -> None:
        require_parameter(self.head >= 1, "surrogate.head", ">= 1", self.head)
        require_parameter(0 <= self.low <= 1, "surrogate.low", "in [0, 1]", self.low)
        require_parameter(self.high >= 1, "surrogate.high", ">= 1", self.high)

    @property
    def head_tokens(self) -> int:
        """K."""
        return self.head

    def __call__(self, inputs: SurrogateInputs) -> tuple[TokenLosses, Mapping[str, Tensor]]:
        """Token losses [B, T], and what the head covered."""
        result = score_centered(
            inputs.target_logprobs,
            inputs.behaviour_logprobs,
            inputs.head_target_logprobs,
            inputs.head_behaviour_logprobs,
            inputs.advantages,
            inputs.mask,
            weight=self.weight,
            low=self.low,
            high=self.high,
        )
        head = result.head
        return result.token, {
            "head_mass_behaviour": head.behaviour_mass,
            "head_mass_target": head.target_mass,
            "head_tail_ratio": head.tail_ratio,
            "centering_l1": head.coefficient_l1,
        }


@dataclass(frozen=True, slots=True)
class CrossEntropy(_Plain):
    """Imitation of the tokens as they stand: an expert's. No advantage, no ratio."""

    kind: ClassVar[str] = "cross_entropy"
    uses_advantages: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset({Need.EXPERT})

    def losses(self, inputs: SurrogateInputs) -> TokenLosses:
        """Token losses [B, T]."""
        return surrogates.cross_entropy(inputs.target_logprobs)
