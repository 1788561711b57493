"""What a micro-batch brings to the objective: scores of several policies, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from correction.checks import (
    require_finite,
    require_floating,
    require_given,
    require_integers,
    require_logprobs,
    require_range,
    require_shape,
)


@dataclass(frozen=True, slots=True, eq=False)
class PromptInputs:
    """Logprobs of the prompts' own tokens, [B, T]; target_logprobs with gradient.

    mask: bool, true on prompt tokens but for the first of a row, about which no logits speak.
    """

    target_logprobs: Tensor
    reference_logprobs: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyInputs:
    """A micro-batch of whole trajectories, padded to a common length; all [B, T] but as said.

    target_logprobs: floating, log theta of the sampled tokens, with gradient.
    behaviour_logprobs: log mu as the engine returned it.
    lag_versions: int64, learner version minus behaviour version, >= 0.
    turn_ids: int64, in [0, T), the turn of each sampled token.
    proximal_logprobs: log prox that the learner kept from its first pass; None where the recipe's
        `needs_proximal_pass` is false or the batch was scored beforehand.
    entropy, values: of theta and of the critic, with gradient. final_values: [B].
    head_target_logprobs, head_behaviour_logprobs: [B, T, K], see `score_centering`.
    Optional ones are None unless the recipe needs them.
    """

    target_logprobs: Tensor
    behaviour_logprobs: Tensor
    lag_versions: Tensor
    turn_ids: Tensor
    proximal_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None
    head_target_logprobs: Tensor | None = None
    head_behaviour_logprobs: Tensor | None = None
    prompt: PromptInputs | None = None

    def check(self, mask: Tensor) -> None:
        """Raise InputError for shapes, dtypes, and broken numbers where `mask` [B, T] is true."""
        for name, below in (("lag_versions", None), ("turn_ids", mask.shape[1])):
            ids = getattr(self, name)
            require_integers(name, ids)
            require_shape(name, ids, tuple(mask.shape))
            require_range(name, ids, mask, 0, below)
        for name in ("target_logprobs", "behaviour_logprobs", "proximal_logprobs"):
            logprobs = getattr(self, name)
            if logprobs is not None:
                require_logprobs(name, logprobs.detach(), mask)
        for name in ("entropy", "values"):
            numbers = getattr(self, name)
            if numbers is not None:
                require_floating(name, numbers)
                require_shape(name, numbers, tuple(mask.shape))
                require_finite(name, numbers.detach(), mask)

    def critic_values(self) -> tuple[Tensor, Tensor]:
        """V of the state before each token [B, T], and after the last [B], both detached."""
        values = require_given("values", self.values, "V-trace with a critic")
        final = require_given("final_values", self.final_values, "V-trace with a critic")
        return values.detach(), final.detach()
