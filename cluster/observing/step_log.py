"""steps.jsonl: steps, broadcasts and evaluations, one JSON object a line, as they happen.

Each object has a `kind`: "step", "broadcast" or "evaluation", then the fields of its event, with
the version as `policy_version` (optimiser steps) and `epoch`. Lines are flushed one by one; a
crash can tear only the last one, which readers skip and a resumed log closes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from cluster.observing.events import (
    ActorStats,
    BroadcastEvent,
    EvaluationEvent,
    QueueStats,
    StepEvent,
)
from cluster.observing.run_directory import json_value
from correction.versions import PolicyVersion


class StepLog:
    """Observer that appends to a log. Opens at once; an existing log is continued."""

    def __init__(self, path: Path) -> None:
        torn = _ends_torn(path)
        self._file: TextIO = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def on_step(self, event: StepEvent) -> None:
        """Append the step."""
        self._append("step", event)

    def on_broadcast(self, event: BroadcastEvent) -> None:
        """Append one engine's part in a broadcast."""
        self._append("broadcast", event)

    def on_evaluation(self, event: EvaluationEvent) -> None:
        """Append the evaluation."""
        self._append("evaluation", event)

    def on_queue(self, stats: QueueStats) -> None:
        """Not logged: the metrics endpoint has it."""

    def on_actors(self, stats: Mapping[str, ActorStats]) -> None:
        """Not logged: the metrics endpoint has it."""

    def on_message(self, level: str, text: str) -> None:
        """Not logged: messages are for people."""

    def _append(self, kind: str, event: StepEvent | BroadcastEvent | EvaluationEvent) -> None:
        record = {"kind": kind, **event_record(event)}
        self._file.write(json.dumps(json_value(record), allow_nan=False) + "\n")
        self._file.flush()


def event_record(event: StepEvent | BroadcastEvent | EvaluationEvent) -> dict[str, object]:
    """Fields of an event, with its version as two numbers."""
    record: dict[str, object] = {}
    for name in (field.name for field in fields(event)):
        value = getattr(event, name)
        if isinstance(value, PolicyVersion):
            record |= {"policy_version": value.step, "epoch": value.epoch}
        else:
            record[name] = value
    return record


def read_log(path: Path) -> Iterator[dict[str, object]]:
    """Records of a log, in order. Lines that are no JSON object (torn by a crash) are skipped."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
