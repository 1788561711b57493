"""The run configuration: a TOML file and `--set key=value` become one frozen, checked record.

    load_config     file and overrides -> RunConfig
    parse_config    nested mapping     -> RunConfig
    resolved        RunConfig          -> what config.json holds; parse_config reads it back

Every problem is a ConfigError that names the key, the value and what is expected, all problems
at once. Imports nothing heavy. The fields are in `config_sections.py`; rules between fields in
`checks.py`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from cluster.config_problems import describe_problems
from cluster.config_sections import (
    ActorsSection,
    BroadcastSection,
    CorrectionSection,
    CriticSection,
    EngineSection,
    EnvironmentSection,
    EvaluationSection,
    LagSection,
    LearnerSection,
    MetricsSection,
    ModelSection,
    PretrainingSection,
    QueueSection,
    ReferenceSection,
    RolloutSection,
    RunSection,
    Section,
)
from correction.errors import ConfigError


class RunConfig(Section):
    """Everything that a run can be told. Every table and every key has a default."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection = EnvironmentSection()
    rollout: RolloutSection = RolloutSection()
    actors: ActorsSection = ActorsSection()
    engine: EngineSection = EngineSection()
    queue: QueueSection = QueueSection()
    lag: LagSection = LagSection()
    correction: CorrectionSection = CorrectionSection()
    learner: LearnerSection = LearnerSection()
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    pretraining: PretrainingSection = PretrainingSection()
    broadcast: BroadcastSection = BroadcastSection()
    metrics: MetricsSection = MetricsSection()
    evaluation: EvaluationSection = EvaluationSection()


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a TOML file and apply `key=value` overrides (dotted key, value in TOML syntax).

    Raises ConfigError: no such file, not TOML, a bad override, or any bad key or value.
    """
    values = _read_toml(path)
    for override in overrides:
        _apply(values, override)
    return parse_config(values, source=str(path))


def parse_config(values: Mapping[str, Any], *, source: str = "configuration") -> RunConfig:
    """Check nested values. `source` heads the message of the ConfigError."""
    try:
        # JSON, because in strict mode pydantic takes an array for a tuple only from JSON.
        return RunConfig.model_validate_json(json.dumps(values, default=_refuse_date))
    except ValidationError as error:
        problems = describe_problems(error.errors(include_url=False), RunConfig)
        raise ConfigError("\n  ".join([f"{source}:", *problems])) from error


def _refuse_date(value: object) -> NoReturn:
    """Dates and times are the only TOML values that JSON does not have."""
    raise ConfigError(f"{value} is a date or time, which no key takes; put quotes around text")


def resolved(config: RunConfig) -> dict[str, Any]:
    """Every table with every key, as JSON values: the content of config.json."""
    return config.model_dump(mode="json")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one dotted key in nested tables, making tables on the way."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected key=value, such as run.max_steps=20")
    table = values
    for depth, part in enumerate(parts[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {'.'.join(parts[:depth])} is not a table")
    table[parts[-1]] = toml_value(override, text)


def toml_value(override: str, text: str) -> object:
    """The value `text` of `--set override`, in TOML syntax. Raises ConfigError if it is none."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        document = {}
    if document.keys() != {"value"}:
        raise ConfigError(
            f"--set {override}: {text.strip()!r} is not a TOML value; text needs double quotes, "
            f"for example --set 'model.path=\"starter\"'"
        )
    value: object = document["value"]
    return value
