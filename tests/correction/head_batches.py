"""Places with heads for tests of Score Centering: arguments by seed, rules, and evaluation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.score_centering import CenteredWeight, ScoreCentered, score_centered

NONE, TRUNCATE, BAND = CenteredWeight
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """The keyword arguments that say what w is."""

    weight: CenteredWeight
    low: float = 0.5
    high: float = 2.0

    def __str__(self) -> str:
        return self.weight

    def __call__(self, ratio: float) -> float:
        if self.weight is TRUNCATE:
            return min(ratio, self.high)
        if self.weight is BAND:
            return ratio if self.low <= ratio <= self.high else 0.0
        return 1.0


every_rule = pytest.mark.parametrize("rule", [Rule(weight) for weight in CenteredWeight], ids=str)


def batch(seed: int = 0, *, equal: bool = False) -> Arguments:
    """Arguments for two trajectories of three tokens, heads of four out of a vocabulary of nine."""
    random = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(2, 2, 3, 9, generator=random, dtype=torch.float64).log_softmax(dim=-1)
    theta, mu = logprobs[0], logprobs[0] if equal else logprobs[1]
    chosen = torch.randint(0, 9, (2, 3, 1), generator=random)
    head = mu.topk(4, dim=-1).indices
    return {
        "target_logprobs": theta.gather(-1, chosen)[..., 0].requires_grad_(),
        "behaviour_logprobs": mu.gather(-1, chosen)[..., 0],
        "head_target_logprobs": theta.gather(-1, head).requires_grad_(),
        "head_behaviour_logprobs": mu.gather(-1, head),
        "advantages": torch.tensor([[1.5, -0.5, 2.0], [-2.0, 1.0, 0.25]], dtype=torch.float64),
        "mask": torch.tensor([[True, True, False], [True, False, True]]),
    }


def evaluate(arguments: Arguments, rule: Rule) -> tuple[ScoreCentered, Tensor, Tensor]:
    """The result and the gradients of the summed loss in both target tensors."""
    result = score_centered(**arguments, **asdict(rule))
    leaves = (arguments["target_logprobs"], arguments["head_target_logprobs"])
    target_gradient, head_gradient = torch.autograd.grad(result.token.losses.sum(), leaves)
    return result, target_gradient, head_gradient


def tensors(result: ScoreCentered) -> list[Tensor]:
    """Everything that comes out."""
    return [getattr(part, f.name) for part in (result.token, result.head) for f in fields(part)]
