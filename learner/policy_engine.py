"""What a learner step needs of the model in training, on one rank."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from learner.batch import MicroBatch
from learner.forward import ForwardNeeds, ForwardOutputs
from learner.reports import StepOutcome
from learner.scoring import ScoringEngine


class PolicyEngine(ScoringEngine, Protocol):
    """A policy, perhaps with a critic and a frozen reference beside it."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def forward(self, micro: MicroBatch, needs: ForwardNeeds) -> ForwardOutputs:
        """Outputs of the policy in training, on the CPU, with a graph. All ranks."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of the global loss. All ranks."""
        ...

    def cross_entropy(self, token_ids: Tensor) -> tuple[Tensor, int]:
        """Summed -log p of all but the first token of each row [B, T], and their count; with a
        graph. All ranks."""
        ...

    def step(self, rate_factor: float = 1.0) -> StepOutcome:
        """Apply the accumulated gradient at the scheduled rate x `rate_factor`, or refuse it. All
        ranks."""
        ...
