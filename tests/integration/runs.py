"""Starting a run as a user does, for the tests of the whole stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEMO = "deploy/runs/demo.toml"


@dataclass(frozen=True)
class Finished:
    """A run that ended. directory and summary are those of the run, if it came so far."""

    code: int
    output: str
    directory: Path | None
    summary: dict[str, Any]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Lines of steps.jsonl of one kind."""
        assert self.directory is not None
        lines = (self.directory / "steps.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


MARK = "LAGWISE_TEST_RUN"
"""Environment variable that every process of a run inherits, so that others' are not ours."""


def start(root: Path, settings: dict[str, object], config: str = DEMO) -> subprocess.Popen[str]:
    """Start `lagwise run`."""
    overrides = {"run.root": str(root), **settings}
    arguments = [f"--set={key}={json.dumps(value)}" for key, value in overrides.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "cluster", "run", config, *arguments],
        cwd=ROOT,
        env={**os.environ, MARK: str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], root: Path, timeout_s: float = 280) -> Finished:
    """Wait for the end of a run. One that does not end in time is killed, and fails its test."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for pid in processes(root):
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end within {timeout_s:.0f} s:\n{output[-4000:]}") from None
    directories = sorted(root.iterdir()) if root.is_dir() else []
    directory = directories[-1] if directories else None
    summary: dict[str, Any] = {}
    if directory is not None and (directory / "summary.json").is_file():
        summary = json.loads((directory / "summary.json").read_text())
    return Finished(process.returncode, output, directory, summary)


def run(
    root: Path, settings: dict[str, object], config: str = DEMO, timeout_s: float = 280
) -> Finished:
    """Start and finish."""
    return finish(start(root, settings, config), root, timeout_s)


def left_behind(root: Path, grace_s: float = 5.0) -> dict[int, str]:
    """Processes of an ended run that are still alive after a grace."""
    deadline = time.monotonic() + grace_s
    while (alive := processes(root)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return alive


def processes(root: Path) -> dict[int, str]:
    """Processes of the run under `root` that are alive, by command line."""
    mark = f"{MARK}={root}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if mark in environment and command:
                found[int(entry.name)] = command
    return found
