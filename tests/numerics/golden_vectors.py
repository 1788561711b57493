"""The reference vectors: computed by hand, in NumPy, and with public implementations.

The numbers come from `vectors.json`; tolerances are those that the vectors were made for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("vectors.json").read_text())
DTYPES = (torch.float64, torch.float32)

# algorithms.md, section 4.2, row "prime-rl default (mask .2/.2, kl_tau 1e-3, sum)"
PRIME_RL_ROWS = [-1.6934804416, 3.0001655220]
PRIME_RL_SUM = 1.3066850804
PRIME_RL_GRADIENT = [
    [-1.3194447365, -0.3769616585, 0.0, 0.0013862944],
    [1.4994246359, 1.4994246359, 0.0, 0.0],
]


def tensor(values: object, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of numbers from the file."""
    return torch.tensor(values, dtype=dtype)


def assert_golden(actual: Tensor, expected: object) -> None:
    """Equal at 1e-9 in float64 and 1e-5 in float32."""
    tolerance = 1e-9 if actual.dtype == torch.float64 else 1e-5
    wanted = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), wanted, rtol=tolerance, atol=tolerance)


class FixtureF:
    """Two trajectories, five action tokens; probabilities at masked places must not matter."""

    def __init__(self, dtype: torch.dtype) -> None:
        fixture = VECTORS["F.fixture"]
        self.mask = torch.tensor(fixture["mask"]).bool()
        self.advantages = tensor(fixture["A"], dtype)
        self.target = tensor(fixture["p_theta"], dtype).log()
        self.proximal = tensor(fixture["p_prox"], dtype).log()
        self.behaviour = tensor(fixture["p_mu"], dtype).log()
        self.turns = torch.zeros(2, 4, dtype=torch.int64)
        self.lag = torch.tensor([[0, 1, -7, 3], [2, 2, -7, -7]])
