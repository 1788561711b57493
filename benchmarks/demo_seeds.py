"""Does the demo learn on every seed: held-out success before and after, lag, ledger, time?

Runs `deploy/runs/demo.toml` as it is with seeds 17, 18, 19. A run that leaves a process behind or
does not exit with 0 fails the benchmark.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks._runs import run

SEEDS = (17, 18, 19)


def measure() -> dict[str, object]:
    """One row a seed."""
    result: dict[str, object] = {}
    gains = []
    for seed in SEEDS:
        summary = run("deploy/runs/demo.toml", {"run.seed": seed}, Path("runs/bench-demo"))
        before, after = summary["evaluation"][0], summary["evaluation"][-1]
        gains.append(after["success"] - before["success"])
        result[f"seed_{seed}"] = {
            "success_before": round(before["success"], 3),
            "success_after": round(after["success"], 3),
            "steps": summary["steps"],
            "lag_mean": round(summary["policy_lag"]["mean"], 2),
            "lag_max": summary["policy_lag"]["max"],
            "open": summary["trajectories"]["open"],
            "dropped": summary["trajectories"]["dropped"],
            "wall_s": round(summary["wall_s"], 1),
            "training_s": round(summary["training_s"], 1),
        }
        print(f"  seed {seed}: {result[f'seed_{seed}']}", flush=True)
    result["median_gain"] = round(statistics.median(gains), 3)
    return result
