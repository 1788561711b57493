"""Starting runs as a user does, in a process of their own, and reading what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(config: str, settings: dict[str, object], root: Path) -> dict[str, Any]:
    """Run `lagwise run`; returns its summary, with `training_s` from the first wait to the last
    step. Raises RuntimeError for an exit code other than 0 or a process that stays behind."""
    overrides = {"run.root": str(root), **settings}
    arguments = [f"--set={key}={json.dumps(value)}" for key, value in overrides.items()]
    before = set(_ours())
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "run", config, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    left = set(_ours()) - before
    if left:
        raise RuntimeError(f"processes left behind: {left}")
    directory = max(root.iterdir(), key=lambda path: path.stat().st_mtime)
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    steps = [step for step in _records(directory) if step["kind"] == "step"]
    first = steps[0]
    summary["training_s"] = steps[-1]["at_s"] - (first["at_s"] - first["step_s"] - first["wait_s"])
    summary["directory"] = str(directory)
    return summary


def _records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]


def _ours() -> list[str]:
    """Processes of Ray and vLLM, by their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if any(name in command for name in ("raylet", "gcs_server", "EngineCore", "ray::")):
                found.append(f"{entry.name} {command[:60]}")
    return found
