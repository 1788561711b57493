"""Cells of the lag ablation, what came out of them, and when a run counts as collapsed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. lag: the bound, in versions."""

    method: str
    lag: int
    seed: int
    steps: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out. success: on held-out tasks at the end. reward_first, reward_last: means over
    the first and last tenth of the steps. error: why the run ended early, else empty."""

    cell: Cell
    success: float
    reward_first: float
    reward_last: float
    lag_mean: float
    lag_max: int
    ess_raw: float
    wall_s: float
    error: str = ""

    @property
    def collapsed(self) -> bool:
        """The rule, fixed before the runs: it ended with an error, or its last tenth is not better
        than its first."""
        return bool(self.error) or self.reward_last <= self.reward_first

    def told(self) -> str:
        """One line."""
        end = "collapsed" if self.collapsed else f"success {self.success:.2f}"
        cell = self.cell
        return (
            f"{cell.method} lag {cell.lag} seed {cell.seed}: reward {self.reward_first:.2f} -> "
            f"{self.reward_last:.2f}, {end}, lag mean {self.lag_mean:.1f}, {self.wall_s:.0f} s"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Outcome:
        """Inverse of `as_json`."""
        return cls(**{**values, "cell": Cell(**values["cell"])})

    @classmethod
    def failed(cls, cell: Cell, error: str) -> Outcome:
        """A run that did not end by itself."""
        return cls(cell, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, error)


def outcome_of(cell: Cell, summary: Mapping[str, Any]) -> Outcome:
    """From a run's summary."""
    return Outcome(
        cell=cell,
        success=round(summary["evaluation"][-1]["success"], 3),
        reward_first=round(summary["reward"]["first"], 3),
        reward_last=round(summary["reward"]["last"], 3),
        lag_mean=round(summary["policy_lag"]["mean"], 2),
        lag_max=summary["policy_lag"]["max"],
        ess_raw=round(summary["ess_ratio"]["raw"], 3),
        wall_s=round(summary["wall_s"], 1),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """A method at a lag, over its seeds; success and reward_last: (mean, lowest, highest)."""

    method: str
    lag: int
    seeds: int
    success: tuple[float, float, float]
    reward_last: tuple[float, float, float]
    collapsed: int
    lag_mean: float
    ess_raw: float


def rows_of(outcomes: Sequence[Outcome], methods: Sequence[str], lags: Sequence[int]) -> list[Row]:
    """One row for each method and lag that has an outcome, in the given order."""
    rows = []
    for lag in lags:
        for method in methods:
            found = [o for o in outcomes if (o.cell.method, o.cell.lag) == (method, lag)]
            if found:
                rows.append(_row(method, lag, found))
    return rows


def _row(method: str, lag: int, found: Sequence[Outcome]) -> Row:
    return Row(
        method=method,
        lag=lag,
        seeds=len(found),
        success=_spread([outcome.success for outcome in found]),
        reward_last=_spread([outcome.reward_last for outcome in found]),
        collapsed=sum(outcome.collapsed for outcome in found),
        lag_mean=statistics.mean(outcome.lag_mean for outcome in found),
        ess_raw=statistics.mean(outcome.ess_raw for outcome in found),
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.mean(values), min(values), max(values)
