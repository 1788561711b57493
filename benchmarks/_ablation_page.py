"""The page of the lag ablation: what came out, written from the runs below a mark in the page.

What stands above the mark, how to read it, is written by hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._ablation_cells import Outcome, collapsed, start_successes

PAGE = Path("docs/lag_ablation.md")
IMAGE = Path("images/lag_ablation.svg")
"""Relative to the page."""
MARK = "<!-- Below this line: written by `lagwise bench lag_ablation --set write_docs=true`. -->"

HEAD = (
    "lag, mean",
    "lag, max",
    "method",
    "held-out success",
    "reward, last tenth",
    "collapsed",
    "ESS raw",
    "clipped",
    "bounded",
    "run, s",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and range over seeds."""

    mean: float
    low: float
    high: float

    def told(self, digits: int = 2) -> str:
        """`0.81 (0.75 to 0.86)`; without the range where it is a point."""
        mean, low, high = (f"{value:.{digits}f}" for value in (self.mean, self.low, self.high))
        return mean if low == high else f"{mean} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class Row:
    """A method at a wanted lag, over its seeds. A spread is None where no run observed it."""

    method: str
    lag: int
    runs: int
    collapsed: int
    lag_max: int
    lag_mean: Spread | None
    success: Spread | None
    reward_last: Spread | None
    ess_raw: Spread | None
    clipped: Spread | None
    bounded: Spread | None
    wall_s: Spread | None


def rows_of(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row for each wanted lag and method, in the order in which they first occur."""
    outcomes = list(outcomes)
    start = start_successes(outcomes)
    found: dict[tuple[int, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda each: each.cell.lag):
        found.setdefault((outcome.cell.lag, outcome.cell.method), []).append(outcome)
    return [_row(lag, method, mine, start) for (lag, method), mine in found.items()]


def _row(lag: int, method: str, mine: Sequence[Outcome], start: Mapping[int, float]) -> Row:
    def spread(value: Callable[[Outcome], float | None]) -> Spread | None:
        values = [each for outcome in mine if (each := value(outcome)) is not None]
        return Spread(statistics.mean(values), min(values), max(values)) if values else None

    return Row(
        method=method,
        lag=lag,
        runs=len(mine),
        collapsed=sum(collapsed(each, start.get(each.cell.seed)) for each in mine),
        lag_max=max((each.lag_max or 0) for each in mine),
        lag_mean=spread(lambda each: each.lag_mean),
        success=spread(lambda each: each.success),
        reward_last=spread(lambda each: each.reward_last),
        ess_raw=spread(lambda each: each.ess_raw),
        clipped=spread(lambda each: each.clipped),
        bounded=spread(lambda each: each.bounded),
        wall_s=spread(lambda each: each.wall_s),
    )


def table_of(rows: Sequence[Row]) -> str:
    """A Markdown table, one row a lag and method."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    def told(spread: Spread | None, digits: int = 2) -> str:
        return spread.told(digits) if spread else "-"

    return (
        told(row.lag_mean, 1),
        str(row.lag_max),
        f"`{row.method}`",
        told(row.success),
        told(row.reward_last),
        f"{row.collapsed} of {row.runs}",
        told(row.ess_raw),
        told(row.clipped, 3),
        told(row.bounded, 3),
        told(row.wall_s, 0),
    )


def findings_of(rows: Sequence[Row]) -> str:
    """A sentence a lag: collapses, and the highest and the lowest mean success."""
    lines = []
    for lag in dict.fromkeys(row.lag for row in rows):
        mine = [row for row in rows if row.lag == lag]
        ranked = sorted((row.success.mean, row.method) for row in mine if row.success)
        real = [row.lag_mean.mean for row in mine if row.lag_mean]
        if not (ranked and real):
            continue
        (low, worst), (high, best) = ranked[0], ranked[-1]
        gone = ", ".join(f"`{r.method}` {r.collapsed} of {r.runs}" for r in mine if r.collapsed)
        lines.append(
            f"- Lag {statistics.mean(real):.1f} (wanted {lag}): highest `{best}` {high:.2f}, "
            f"lowest `{worst}` {low:.2f}; collapsed: {gone or 'none'}."
        )
    return "\n".join(lines)


def page_below(outcomes: Sequence[Outcome], missing: int) -> str:
    """What stands below the mark. missing: runs of the grid without an outcome."""
    rows = rows_of(outcomes)
    start = ", ".join(f"{s} {v:.3f}" for s, v in sorted(start_successes(outcomes).items()))
    parts = [
        _origin(outcomes),
        f"Success at the start, by seed: {start}." if start else "",
        f"**{missing} runs of the grid are missing.**" if missing else "",
        f"![Held-out success and collapse against policy lag, a line a method]({IMAGE})",
        findings_of(rows),
        table_of(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _origin(outcomes: Sequence[Outcome]) -> str:
    def several(values: Iterable[object]) -> str:
        return ", ".join(str(value) for value in dict.fromkeys(values))

    loads = [outcome.load for outcome in outcomes]
    return (
        f"{len(outcomes)} runs of {several(o.cell.steps for o in outcomes)} steps, seeds "
        f"{several(o.cell.seed for o in outcomes)}, learning rate "
        f"{several(o.cell.learning_rate for o in outcomes)}; commit "
        f"{several(o.commit[:10] for o in outcomes)}; {several(o.machine for o in outcomes)}; load "
        f"average {min(loads):.1f} to {max(loads):.1f}."
    )


def write_page(outcomes: Sequence[Outcome], missing: int, page: Path = PAGE) -> None:
    """Replace what stands below MARK. Raises ValueError for a page without MARK."""
    above, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{page}: has no line {MARK}")
    page.write_text(f"{above}{MARK}\n\n{page_below(outcomes, missing)}", encoding="utf-8")
