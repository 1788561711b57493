"""The reference policy: a frozen copy of the start policy, which a KL penalty measures against.

It stands outside of DeepSpeed: no gradient, no optimiser state, and nothing of it is sharded.
ZeRO-3 splits the policy in training over the ranks but not this copy, so every rank holds all of
its weights: 2 bytes a parameter in bfloat16, 4 in float32 (1 GB a rank for 0.5B parameters in
bfloat16). It is loaded only where the settings ask for one.
"""

from __future__ import annotations

import torch

from learner.batch import MicroBatch
from learner.forward import (
    ForwardNeeds,
    ForwardOutputs,
    PolicyForward,
    RawOutputs,
    forward_arguments,
)
from learner.policy_model import load_policy
from learner.settings import LearnerSettings, ReferenceSettings


class ReferencePolicy:
    """Scores micro-batches as they are; holds the training dtype, so that only weights differ."""

    def __init__(
        self, settings: LearnerSettings, reference: ReferenceSettings, device: torch.device
    ) -> None:
        """Load it. Raises ConfigError for a model without an output head."""
        model = load_policy(settings, reference.path).requires_grad_(False).eval()
        self._forward = PolicyForward(model).to(device)
        self._device = device

    def score(self, micro: MicroBatch, needs: ForwardNeeds) -> ForwardOutputs:
        """Logprobs, and those of the prompts where needed; nothing else. Without a graph.

        No other rank takes part.
        """
        wanted = ForwardNeeds(prompt=needs.prompt)
        with torch.no_grad():
            raw: RawOutputs = self._forward(**forward_arguments(micro, wanted, self._device))
        return raw.on_cpu()
