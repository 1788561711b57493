"""One run of the lag ablation, started as a user starts it."""

from __future__ import annotations

import functools
import os
from typing import Any

from benchmarks._ablation_cells import Outcome, outcome_of
from benchmarks._ablation_grid import CONFIG, Cell
from cluster.bench import provenance
from tests.integration.runs import ROOT, finish, left_behind, start

RUNS = ROOT / "runs" / "bench-ablation"
TIMEOUT_S = 900.0


def run_cell(cell: Cell) -> Outcome:
    """Run one cell. A run that was stopped as not finite is an outcome too.

    Raises RuntimeError for every other failure, with its last line, and for processes that stay
    behind.
    """
    root = RUNS / f"lag{cell.lag}-{cell.method}-seed{cell.seed}"
    root.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    try:
        finished = finish(start(root, cell.settings(), CONFIG), root, TIMEOUT_S)
    except AssertionError as error:  # no end in time: the helper of the tests has killed it
        raise RuntimeError(str(error)) from None
    if left := left_behind(root):
        raise RuntimeError(f"processes left behind: {left}")
    if not finished.summary:
        raise RuntimeError(f"no summary: {finished.output.strip()[-400:]}")
    steps = finished.records("step")
    return outcome_of(cell, finished.summary, steps, {**_machine(), "load": round(load, 2)})


@functools.cache
def _machine() -> dict[str, Any]:
    """Commit and machine, as they were when the first run started."""
    known = provenance()
    machine: Any = known["machine"]
    return {
        "commit": known["commit"],
        "machine": f"{machine['processor']}, {machine['cores']} cores",
    }
