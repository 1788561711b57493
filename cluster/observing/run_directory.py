"""The directory of one run: where its files lie, and how they are written so that none is torn.

config.json     resolved configuration
summary.json    what the run came to (see `summary`), replaced as a whole
steps.jsonl     one event a line (see `step_log`)
policy/         the trained policy
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from correction.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str, now: datetime | None = None) -> RunDirectory:
        """Make a new directory under root: `20260131T120000Z-name`, sortable by start.

        A second run of the same name and second gets `-002`, and so on. now: with time zone;
        None is the present. Raises ConfigError where root cannot be written.
        """
        stamp = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        stem = f"{stamp}-{_file_name(name)}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(_make_unique(root, stem))
        except OSError as error:
            raise ConfigError(f"run directory: cannot write under {root}: {error}") from error

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run. Raises ConfigError where there is none."""
        if not (path / "config.json").is_file():
            raise ConfigError(f"run directory: {path} is not one: it holds no config.json")
        return cls(path)

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def summary_path(self) -> Path:
        """What the run came to."""
        return self.path / "summary.json"

    @property
    def steps_path(self) -> Path:
        """The event log."""
        return self.path / "steps.jsonl"

    @property
    def policy_path(self) -> Path:
        """Folder of the exported policy."""
        return self.path / "policy"

    def write_config(self, config: Mapping[str, object]) -> None:
        """Write config.json, whole or not at all."""
        write_json(self.config_path, config)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write or replace summary.json, whole or not at all."""
        write_json(self.summary_path, summary)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON so that a reader, or a crash, sees the old file or the new one, never a part.

    Non-finite numbers become null: JSON has none.
    """
    text = json.dumps(json_value(content), indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def json_value(value: object) -> object:
    """`value` with text keys, lists for tuples, and null for non-finite numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value


def _make_unique(root: Path, stem: str) -> Path:
    for number in range(1, 1000):
        path = root / (stem if number == 1 else f"{stem}-{number:03d}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{root / stem} exists a thousand times")


def _file_name(name: str) -> str:
    """`name` in characters that are safe in every file system; never empty, never hidden."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "run"


def _sync_directory(path: Path) -> None:
    """Make a rename in the directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
