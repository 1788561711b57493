"""What does lag buy: the same steps strictly on-policy and with lag allowed, in wall time?

Alternates runs of the demo with max_lag_versions 0 and 4 on one machine, same seeds, same number
of steps and trajectories; the ratio is of medians.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks._runs import run

SEEDS = (17, 18, 19)
LAGS = (0, 4)


def measure() -> dict[str, object]:
    """Training seconds by lag bound, and their ratio."""
    seconds: dict[int, list[float]] = {lag: [] for lag in LAGS}
    success: dict[int, list[str]] = {lag: [] for lag in LAGS}
    for seed in SEEDS:
        for lag in LAGS:
            settings: dict[str, object] = {"run.seed": seed, "lag.max_lag_versions": lag}
            summary = run("deploy/runs/demo.toml", settings, Path("runs/bench-lag"))
            if summary["policy_lag"]["max"] > lag:
                raise RuntimeError(f"lag {summary['policy_lag']['max']} over the bound of {lag}")
            seconds[lag].append(summary["training_s"])
            before, after = (summary["evaluation"][at]["success"] for at in (0, -1))
            success[lag].append(f"{before:.3f} -> {after:.3f}")
            print(
                f"  seed {seed} max_lag {lag}: {summary['training_s']:.1f} s, "
                f"lag mean {summary['policy_lag']['mean']:.2f} max {summary['policy_lag']['max']}, "
                f"success {success[lag][-1]}, whole run {summary['wall_s']:.0f} s, "
                f"open {summary['trajectories']['open']}",
                flush=True,
            )
    medians = {lag: statistics.median(values) for lag, values in seconds.items()}
    return {
        **{f"training_s_max_lag_{lag}": [round(s, 1) for s in seconds[lag]] for lag in LAGS},
        **{f"success_max_lag_{lag}": success[lag] for lag in LAGS},
        "speed_up_of_medians": round(medians[LAGS[0]] / medians[LAGS[1]], 2),
    }
