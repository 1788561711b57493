"""Made outcomes for the tests of the lag ablation."""

from __future__ import annotations

from benchmarks._ablation_cells import Outcome
from benchmarks._ablation_grid import Cell


def made(
    *,
    method: str = "tis",
    lag: int = 4,
    seed: int = 17,
    success: float | None = 0.8,
    start: float | None = 0.5,
    stopped: str | None = None,
) -> Outcome:
    cell = Cell(seed, lag, method, 60, 5e-4)
    return Outcome(
        cell=cell,
        settings=cell.settings(),
        start_success=start,
        success=success,
        success_high=None if success is None else success + 0.05,
        reward_first=0.5,
        reward_last=success,
        lag_mean=0.9 * lag,
        lag_max=lag,
        ess_raw=0.9,
        ess_bounded=0.95,
        clipped=0.0,
        bounded=0.012,
        training_s=20.0,
        wall_s=40.0,
        dropped={},
        stopped=stopped,
        commit="0123456789abcdef",
        machine="a processor, 2 cores",
        load=1.0,
    )
