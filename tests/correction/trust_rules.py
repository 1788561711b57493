"""Batches for the trust masks, and every rule by name, at usual and at its strictest parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from correction.trust import (
    LagUnit,
    Reduction,
    dppo_kl,
    dppo_tv,
    geometric_band,
    k3_limit,
    kpop,
    opsm,
    second_moment,
    veto,
    within_lag,
)


@dataclass(frozen=True)
class TrustBatch:
    """What the rules look at, all [B, T]."""

    target: Tensor
    behaviour: Tensor
    advantages: Tensor
    lag: Tensor
    mask: Tensor

    @property
    def logs(self) -> Tensor:
        """Token log theta/mu; nonsense at masked places stays nonsense."""
        return self.target - self.behaviour

    def rows(self, order: list[int]) -> TrustBatch:
        """Some rows, in some order."""
        index = torch.tensor(order)
        return TrustBatch(*(getattr(self, field.name)[index] for field in fields(self)))

    def padded(self, columns: int) -> TrustBatch:
        """Masked columns in front and behind."""
        pad = torch.nn.functional.pad
        return TrustBatch(
            *(pad(getattr(self, field.name), (columns, columns)) for field in fields(self))
        )

    def with_garbage(self, garbage: float) -> TrustBatch:
        """`garbage` at the masked places of every number, nonsense in the lag."""
        numbers = {
            name: torch.where(self.mask, getattr(self, name), garbage)
            for name in ("target", "behaviour", "advantages")
        }
        return replace(self, **numbers, lag=torch.where(self.mask, self.lag, -(2**40)))

    def on_policy(self) -> TrustBatch:
        """theta is mu, and nothing is late."""
        return replace(self, target=self.behaviour.clone(), lag=torch.zeros_like(self.lag))

    def to(self, dtype: torch.dtype) -> TrustBatch:
        """Numbers in another dtype."""
        names = ("target", "behaviour", "advantages")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


def make_trust_batch(seed: int, rows: int = 4, columns: int = 6, spread: float = 0.5) -> TrustBatch:
    """A batch in float64, one advantage a row. Row 0 has an action token for sure."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    behaviour = -1.5 * normal(rows, columns).abs() - 1e-3
    mask = torch.rand(rows, columns, generator=random) < 0.7
    mask[0, 0] = True
    return TrustBatch(
        target=behaviour * (spread * normal(rows, columns)).exp(),
        behaviour=behaviour,
        advantages=normal(rows, 1).expand(rows, columns).contiguous(),
        lag=torch.randint(0, 6, (rows, columns), generator=random),
        mask=mask,
    )


Rule = Callable[[TrustBatch], Tensor]


def rules(
    *, lag: int, low: float, high: float, rise: float, divergence: float, moment: float
) -> dict[str, Rule]:
    """Every rule by name. rise: of a probability, both ways. divergence: in nats."""
    return {
        "lag_token": lambda b: within_lag(b.lag, b.mask, max_lag_versions=lag, unit=LagUnit.TOKEN),
        "lag_trajectory": lambda b: within_lag(
            b.lag, b.mask, max_lag_versions=lag, unit=LagUnit.TRAJECTORY
        ),
        "geometric_band": lambda b: geometric_band(b.logs, b.mask, low=low, high=high),
        "k3_mean": lambda b: k3_limit(b.logs, b.mask, limit=divergence, reduction=Reduction.MEAN),
        "k3_sum": lambda b: k3_limit(b.logs, b.mask, limit=divergence, reduction=Reduction.SUM),
        "k3_max": lambda b: k3_limit(b.logs, b.mask, limit=divergence, reduction=Reduction.MAX),
        "veto": lambda b: veto(b.logs, b.mask, low=low),
        "opsm": lambda b: opsm(b.logs, b.advantages, b.mask, limit=divergence),
        "dppo_tv": lambda b: dppo_tv(
            b.target, b.behaviour, b.advantages, b.mask, low=rise, high=rise
        ),
        "dppo_kl": lambda b: dppo_kl(b.target, b.behaviour, b.advantages, b.mask, limit=divergence),
        "kpop": lambda b: kpop(b.target, b.behaviour, b.mask, limit=divergence),
        "second_moment": lambda b: second_moment(b.logs, b.mask, limit=moment),
    }


USUAL = rules(lag=3, low=0.7, high=1.3, rise=0.1, divergence=0.1, moment=0.2)
LOOSER = rules(lag=4, low=0.5, high=2.0, rise=0.2, divergence=0.3, moment=0.6)
STRICTEST = rules(lag=0, low=1.0, high=1.0, rise=0.0, divergence=0.0, moment=1e-300)
WHOLE_TRAJECTORIES = {
    "lag_trajectory",
    "geometric_band",
    "k3_mean",
    "k3_sum",
    "k3_max",
    "veto",
    "opsm",
}
