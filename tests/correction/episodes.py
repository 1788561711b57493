"""Random episodes with tool gaps, padding and turns, for GAE and V-trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from correction.gae import GaeEstimate, gae
from correction.ratios import Level
from correction.steps import StepUnit
from correction.vtrace import VtraceEstimate, vtrace

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e6, -1e6)


@dataclass(frozen=True)
class Episodes:
    """Arguments of `vtrace`; those of `gae` are among them. Masked places hold 0."""

    log_ratios: Tensor
    rewards: Tensor
    values: Tensor
    bootstrap: Tensor
    mask: Tensor
    turns: Tensor

    def to(self, dtype: torch.dtype) -> Episodes:
        return replace(
            self,
            log_ratios=self.log_ratios.to(dtype),
            rewards=self.rewards.to(dtype),
            values=self.values.to(dtype),
            bootstrap=self.bootstrap.to(dtype),
        )

    def rows(self, index: Tensor) -> Episodes:
        return Episodes(
            self.log_ratios[index],
            self.rewards[index],
            self.values[index],
            self.bootstrap[index],
            self.mask[index],
            self.turns[index],
        )

    def alone(self, row: int) -> Episodes:
        """One trajectory without its gaps and padding: [1, its action tokens]."""
        keep = self.mask[row]
        turns = self.turns[row, keep]
        return Episodes(
            self.log_ratios[row, keep][None],
            self.rewards[row, keep][None],
            self.values[row, keep][None],
            self.bootstrap[row : row + 1],
            self.mask[row, keep][None],
            torch.unique(turns, return_inverse=True)[1][None],
        )

    def with_garbage(self, garbage: float) -> Episodes:
        """The same where the mask is true, `garbage` in the log ratios and values elsewhere."""
        return replace(
            self,
            log_ratios=self.log_ratios.masked_fill(~self.mask, garbage),
            values=self.values.masked_fill(~self.mask, garbage),
            turns=self.turns.masked_fill(~self.mask, -7),
        )


def make_episodes(seed: int, rows: int = 3, columns: int = 8, spread: float = 0.5) -> Episodes:
    """float64; every row has an action token, about a third of the places have none."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    mask = torch.rand(shape, generator=generator) > 0.35
    mask[torch.arange(rows), torch.randint(0, columns, (rows,), generator=generator)] = True
    begins = torch.rand(shape, generator=generator) > 0.6
    begins[:, 0] = False

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return Episodes(
        (spread * normal(*shape)) * mask,
        normal(*shape) * mask,
        normal(*shape) * mask,
        normal(rows),
        mask,
        begins.cumsum(dim=-1),
    )


def gae_of(
    episodes: Episodes,
    unit: StepUnit = StepUnit.TOKEN,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    length_alpha: float = 0.0,
) -> GaeEstimate:
    return gae(
        episodes.rewards,
        episodes.values,
        episodes.bootstrap,
        episodes.mask,
        episodes.turns,
        gamma=gamma,
        gae_lambda=gae_lambda,
        unit=unit,
        length_alpha=length_alpha,
    )


def vtrace_of(
    episodes: Episodes,
    unit: StepUnit = StepUnit.TOKEN,
    *,
    gamma: float = 1.0,
    trace_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    turn_level: Level = Level.TURN_GEOMETRIC,
) -> VtraceEstimate:
    return vtrace(
        episodes.log_ratios,
        episodes.rewards,
        episodes.values,
        episodes.bootstrap,
        episodes.mask,
        episodes.turns,
        gamma=gamma,
        unit=unit,
        trace_lambda=trace_lambda,
        rho_bar=rho_bar,
        c_bar=c_bar,
        pg_rho_bar=pg_rho_bar,
        turn_level=turn_level,
    )
