"""What does each correction make of data that lags: final success and collapse, by method and lag?

Real runs of the demo task, every method at every lag on the same seeds and with the same settings.
`runs/bench/lag_ablation.jsonl` keeps each run as it ends: the same command after an interruption
goes on where it was. `--set write_docs=true` writes the table and the plot of
docs/lag_ablation.md; with all runs there, that takes seconds.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks._ablation_cells import Outcome, OutcomeFile, start_successes
from benchmarks._ablation_grid import METHODS, Cell, Grid
from benchmarks._ablation_page import IMAGE, PAGE, rows_of, table_of, write_page
from benchmarks._ablation_plot import plot
from benchmarks._ablation_runs import run_cell
from correction.errors import ConfigError

KEPT = Path("runs/bench/lag_ablation.jsonl")
MOST_FAILURES = 3
"""Failed runs after which the rest is not tried: something is wrong with the machine."""


def measure(
    *,
    seeds: Sequence[int] = (17, 18),
    lags: Sequence[int] = (0, 2, 4, 8, 16),
    methods: Sequence[str] = tuple(METHODS),
    steps: int = 50,
    learning_rate: float = 5e-4,
    parallel: int = 1,
    write_docs: bool = False,
) -> dict[str, object]:
    """Make the runs that are missing; every run, failures, and the table.

    parallel: runs at a time; on two cores two of them take longer than one after the other.
    Raises ConfigError for a bad setting, before anything is started.
    """
    grid = Grid(seeds, lags, methods, steps, learning_rate)
    if type(parallel) is not int or parallel < 1:
        raise ConfigError(f"parallel: must be at least 1, not {parallel}")
    if write_docs and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("write_docs: needs matplotlib, which the extra `dev` installs")
    cells, kept = list(grid.cells()), OutcomeFile(KEPT)
    failures = _run_missing(cells, kept, parallel)
    known = kept.read()
    outcomes = [known[cell] for cell in cells if cell in known]
    if write_docs and outcomes:
        _write_docs(outcomes, missing=len(cells) - len(outcomes))
    print(table_of(rows_of(outcomes)), flush=True)
    return {
        **{_name(outcome.cell): _brief(outcome) for outcome in outcomes},
        "missing": len(cells) - len(outcomes),
        "failures": failures,
    }


def _run_missing(cells: Sequence[Cell], kept: OutcomeFile, parallel: int) -> list[str]:
    """Run what is not kept yet; returns what failed for a reason that is no collapse."""
    known = kept.read()
    missing = [cell for cell in cells if cell not in known]
    print(f"  {len(cells) - len(missing)} of {len(cells)} runs are there already", flush=True)
    failures: list[str] = []
    began = time.monotonic()
    for done, (cell, ended) in enumerate(_ended(missing, parallel), start=1):
        if isinstance(ended, Outcome):
            kept.append(ended)
            told = _told(ended)
        else:
            failures.append(f"{_name(cell)}: {ended}")
            told = f"{_name(cell)} FAILED, to be run again: {ended}"
        left_s = (time.monotonic() - began) / done * (len(missing) - done)
        print(f"  [{done}/{len(missing)}] {told}; {left_s / 60:.0f} min left", flush=True)
        if len(failures) >= MOST_FAILURES:
            break
    return failures


def _ended(cells: Sequence[Cell], parallel: int) -> Iterator[tuple[Cell, Outcome | RuntimeError]]:
    """Runs as they end. Closed early, it lets those in work end and starts no other."""
    with ThreadPoolExecutor(parallel) as pool:
        runs = {pool.submit(run_cell, cell): cell for cell in cells}
        try:
            for run in as_completed(runs):
                error = run.exception()
                if error is not None and not isinstance(error, RuntimeError):
                    raise error
                yield runs[run], error if error is not None else run.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _write_docs(outcomes: Sequence[Outcome], missing: int) -> None:
    start = start_successes(outcomes)
    mean = sum(start.values()) / len(start) if start else None
    plot(rows_of(outcomes), mean, PAGE.parent / IMAGE)
    write_page(outcomes, missing)
    print(f"  written: {PAGE}, {PAGE.parent / IMAGE}", flush=True)


def _name(cell: Cell) -> str:
    return f"seed {cell.seed} lag {cell.lag} {cell.method}"


def _brief(outcome: Outcome) -> dict[str, object]:
    """All of it but what the name and the file of kept runs say."""
    told = outcome.as_json()
    for name in (*Cell.__slots__, "settings", "machine"):
        del told[name]
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}


def _told(outcome: Outcome) -> str:
    if outcome.stopped is not None:
        return f"{_name(outcome.cell)}: stopped, {outcome.stopped}"
    return (
        f"{_name(outcome.cell)}: lag {outcome.lag_mean:.1f} (max {outcome.lag_max}), success "
        f"{outcome.start_success:.2f} -> {outcome.success:.2f}, {outcome.wall_s:.0f} s"
    )
