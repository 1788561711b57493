"""Runs for benchmarks: started as the whole-stack tests start them, with the time of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.runs import left_behind
from tests.integration.runs import run as run_once


def run(config: str, settings: dict[str, object], root: Path) -> dict[str, Any]:
    """Run `lagwise run`; returns its summary with `training_s`, from the first wait for data to the
    end of the last step. Raises RuntimeError for an exit code that is not 0, or for a process
    that stays behind."""
    root = root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    finished = run_once(root, settings, config, timeout_s=1800)
    if finished.code != 0:
        raise RuntimeError(f"exit code {finished.code}:\n{finished.output[-4000:]}")
    if left := left_behind(root):
        raise RuntimeError(f"processes left behind: {left}")
    steps = finished.records("step")
    began_s = steps[0]["at_s"] - steps[0]["step_s"] - steps[0]["wait_s"]
    return {**finished.summary, "training_s": steps[-1]["at_s"] - began_s}
