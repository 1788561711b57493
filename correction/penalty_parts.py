"""The penalties slot: what is added to the loss or taken off the reward. Several may stand in it.

The mathematics is in `penalties` and `prompt_penalty`. A penalty is not weighed by any ratio
unless it says so: it holds for the target policy, whoever sampled the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from torch import Tensor

from correction.checks import require_given, require_parameter
from correction.needs import Need
from correction.penalties import (
    KlEstimator,
    adaptive_coefficient,
    kl_penalty,
    log_ratio_square,
)
from correction.ratios import log_ratio


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PenaltyInputs:
    """What a penalty may look at; all [B, T].

    target_logprobs, entropy: with gradient. kl_coefficient: of the KL penalty, now.
    """

    target_logprobs: Tensor
    behaviour_logprobs: Tensor
    mask: Tensor
    kl_coefficient: float
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Penalty:
    """Base of the penalties."""

    kind: ClassVar[str]

    @property
    def needs(self) -> frozenset[Need]:
        """What the penalty cannot do without."""
        return frozenset()

    def token_losses(self, inputs: PenaltyInputs) -> Tensor | None:
        """Losses [B, T] to be aggregated like the surrogate's; None where it acts elsewhere."""
        return None


class KlPlace(StrEnum):
    """Where a KL penalty acts."""

    REWARD = "reward"
    """Off the reward of each token (k1), so that its gradient is the policy gradient's."""
    LOSS = "loss"
    """In the loss, differentiated."""


@dataclass(frozen=True, slots=True)
class Kl(Penalty):
    """KL of theta to a frozen reference.

    estimator: k1, k2, k3 or k3_plus (value of k3, gradient of k2); in the reward it is k1.
    importance: in the loss, times theta/mu, so that it is the KL of theta and not of mu.
    target: above 0, the coefficient moves so that the KL (k1, whose mean single tokens move least)
    comes to `target` nats a token, at most by a fifth of trajectories / horizon a step.
    """

    coefficient: float = 0.04
    place: KlPlace = KlPlace.LOSS
    estimator: KlEstimator = KlEstimator.K3
    importance: bool = False
    target: float = 0.0
    horizon: float = 10_000.0
    kind: ClassVar[str] = "kl"

    def __post_init__(self) -> None:
        require_parameter(self.coefficient > 0, "penalties.kl.coefficient", "> 0", self.coefficient)
        require_parameter(self.target >= 0, "penalties.kl.target", ">= 0 (0 is off)", self.target)
        require_parameter(self.horizon > 0, "penalties.kl.horizon", "> 0", self.horizon)

    @property
    def needs(self) -> frozenset[Need]:
        """The reference."""
        return frozenset({Need.REFERENCE})

    def token_losses(self, inputs: PenaltyInputs) -> Tensor | None:
        """kl_coefficient x the estimate, in the loss; None in the reward."""
        if self.place is KlPlace.REWARD:
            return None
        importance = None
        if self.importance:
            importance = log_ratio(inputs.target_logprobs, inputs.behaviour_logprobs, inputs.mask)
        return inputs.kl_coefficient * kl_penalty(
            inputs.target_logprobs,
            inputs.reference_logprobs,
            inputs.mask,
            self.estimator,
            log_importance=importance,
        )

    def next_coefficient(self, current: float, measured: float, trajectories: int) -> float:
        """The coefficient after a step that measured `measured` nats a token."""
        if self.target == 0.0:
            return current
        return adaptive_coefficient(
            current,
            measured,
            target=self.target,
            horizon=self.horizon,
            n=min(trajectories, int(self.horizon)),
        )


class PromptWeights(StrEnum):
    """Whose surprise at a prompt weighs its trajectories (ERPO: paper and code differ)."""

    NONE = "none"
    """All prompts alike."""
    START = "start"
    """The start policy's: the paper's."""
    CURRENT = "current"
    """The present policy's: the published code's."""


@dataclass(frozen=True, slots=True)
class PromptKl(Penalty):
    """ERPO: k3 on the prompt's own tokens, and prompts weighed by how likely they are.

    weight_clip: largest weight of a prompt; 0 for no bound (the published code has none).
    """

    coefficient: float = 0.01
    weights: PromptWeights = PromptWeights.START
    weight_clip: float = 2.0
    kind: ClassVar[str] = "prompt_kl"

    def __post_init__(self) -> None:
        key = "penalties.prompt_kl"
        require_parameter(self.coefficient > 0, f"{key}.coefficient", "> 0", self.coefficient)
        require_parameter(
            self.weight_clip == 0 or self.weight_clip >= 1,
            f"{key}.weight_clip",
            "0 (off) or >= 1",
            self.weight_clip,
        )

    @property
    def needs(self) -> frozenset[Need]:
        """Prompt logprobs of theta and the reference."""
        needs = {Need.PROMPT, Need.REFERENCE}
        return frozenset(needs | {Need.SCORES} if self.weights is PromptWeights.CURRENT else needs)


@dataclass(frozen=True, slots=True)
class Entropy(Penalty):
    """A bonus for entropy, as a loss of -coefficient x entropy."""

    coefficient: float = 1e-3
    kind: ClassVar[str] = "entropy"

    def __post_init__(self) -> None:
        require_parameter(
            self.coefficient > 0, "penalties.entropy.coefficient", "> 0", self.coefficient
        )

    @property
    def needs(self) -> frozenset[Need]:
        """Entropy at each sampled token."""
        return frozenset({Need.ENTROPY})

    def token_losses(self, inputs: PenaltyInputs) -> Tensor | None:
        """-coefficient x entropy."""
        return -self.coefficient * require_given("entropy", inputs.entropy, "the entropy bonus")


@dataclass(frozen=True, slots=True)
class LogRatioSquare(Penalty):
    """coefficient x (log theta/mu)^2: a pull back to mu without any clip."""

    coefficient: float = 1e-3
    kind: ClassVar[str] = "log_ratio_square"

    def __post_init__(self) -> None:
        require_parameter(
            self.coefficient > 0, "penalties.log_ratio_square.coefficient", "> 0", self.coefficient
        )

    def token_losses(self, inputs: PenaltyInputs) -> Tensor | None:
        """coefficient x l^2."""
        return self.coefficient * log_ratio_square(
            inputs.target_logprobs, inputs.behaviour_logprobs, inputs.mask
        )


@dataclass(frozen=True, slots=True)
class Pretraining(Penalty):
    """Cross-entropy of pretraining text, mixed in (InstructGPT's ptx); the learner computes it."""

    coefficient: float = 27.8
    kind: ClassVar[str] = "pretraining"

    def __post_init__(self) -> None:
        require_parameter(
            self.coefficient > 0, "penalties.pretraining.coefficient", "> 0", self.coefficient
        )

    @property
    def needs(self) -> frozenset[Need]:
        """A stream of text."""
        return frozenset({Need.PRETRAINING})
