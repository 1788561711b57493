"""What does each correction make of data that lags: final reward and collapse, by method and lag?

Real runs of the demo task, every method at every lag on the same seeds. The lag is made, not only
allowed: engines get new weights every half of the bound, and enough groups are in flight to fill
it. Finished cells are kept beside the runs, so an interrupted benchmark goes on where it stopped;
`runs/bench-ablation` removed, it begins anew. docs/lag_ablation.md and its plot are written from
the cells by `python -m benchmarks.lag_ablation`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks._ablation_cells import Cell, Outcome, outcome_of
from benchmarks._ablation_page import write_page
from benchmarks._runs import run

METHODS = ("none", "ppo_bypass", "decoupled_ppo", "tis", "gspo", "vtrace")
LAGS = (0, 2, 4, 8, 16)
SEEDS = (17, 18)
STEPS = 50
ROOT = Path("runs/bench-ablation")
CELLS = ROOT / "cells.jsonl"


def measure() -> dict[str, object]:
    """Runs the cells that are missing; a row a method and lag, over the seeds."""
    ROOT.mkdir(parents=True, exist_ok=True)
    done = read_cells(CELLS)
    missing = [cell for cell in grid() if cell not in {outcome.cell for outcome in done}]
    began = time.monotonic()
    for number, cell in enumerate(missing):
        outcome = _run(cell)
        with CELLS.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(outcome.as_json()) + "\n")
        done.append(outcome)
        per_cell_s = (time.monotonic() - began) / (number + 1)
        left_minutes = per_cell_s * (len(missing) - number - 1) / 60
        print(f"  {outcome.told()}; {left_minutes:.0f} min left", flush=True)
    return {f"{o.cell.method} lag {o.cell.lag} seed {o.cell.seed}": o.as_json() for o in done}


def grid() -> list[Cell]:
    """All cells, seed by seed, so that a first seed is whole before the next begins."""
    return [Cell(method, lag, seed, STEPS) for seed in SEEDS for lag in LAGS for method in METHODS]


def settings_of(cell: Cell) -> dict[str, object]:
    """What is asked of a run: the same for every method at one lag."""
    half = max(1, cell.lag // 2)
    return {
        "run.name": f"{cell.method}-lag{cell.lag}-seed{cell.seed}",
        "run.seed": cell.seed,
        "run.max_steps": cell.steps,
        "lag.max_lag_versions": cell.lag,
        "broadcast.every_versions": half,
        "actors.groups_in_flight": max(16, 8 * cell.lag),
        "correction.recipe": cell.method,
        "correction.none": cell.method == "none",
        "evaluation.at_start": False,
    }


def read_cells(path: Path) -> list[Outcome]:
    """Outcomes that were kept, in the order in which they were run."""
    if not path.is_file():
        return []
    return [Outcome.of_json(json.loads(line)) for line in path.read_text().splitlines()]


def _run(cell: Cell) -> Outcome:
    """One run. One that ends with an error is an outcome as well: a collapse with its cause."""
    settings = settings_of(cell)
    try:
        summary = run("deploy/runs/demo.toml", settings, ROOT / str(settings["run.name"]))
    except RuntimeError as error:
        return Outcome.failed(cell, str(error).strip().splitlines()[-1])
    return outcome_of(cell, summary)


if __name__ == "__main__":
    write_page(read_cells(CELLS), METHODS, LAGS)
