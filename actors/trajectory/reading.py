"""Columns to records: views into a batch that `columns.py` has checked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, repeat
from typing import Any, TypeVar

import numpy.typing as npt

from actors.trajectory.columns import Columns, Cuts
from actors.trajectory.record import (
    DropReason,
    EndReason,
    KvMode,
    SamplingParameters,
    Trajectory,
    Turn,
    VersionRun,
)
from correction.errors import TrajectoryError
from correction.versions import PolicyVersion

_Enum = TypeVar("_Enum", EndReason, KvMode, DropReason)


def read_trajectories(columns: Columns, cuts: Cuts) -> tuple[Trajectory, ...]:
    """The trajectories of checked columns; their arrays are read-only views.

    Raises TrajectoryError for a name that is not of its enumeration, or a repeated reward part.
    """
    values = columns.values
    turns = _turns(columns, cuts)
    rows = zip(
        values["trajectory_id"],
        values["group_id"],
        values["member"],
        [tuple(turns[first:last]) for first, last in pairwise(columns.offsets["turns"])],
        values["reward"],
        _reward_parts(columns),
        [enum_value(EndReason, name) for name in values["end_reason"]],
        _sampling(columns),
        [enum_value(KvMode, name) for name in values["kv_mode"]],
        values["started_at_s"],
        values["duration_s"],
        strict=True,
    )
    return tuple(Trajectory(*row) for row in rows)


def _turns(columns: Columns, cuts: Cuts) -> list[Turn]:
    """Turns of all rows, in order."""
    tokens, values, runs = columns.tokens, columns.values, _version_runs(columns)
    if not {"stop", "length"}.issuperset(values["turns.finish"]):
        raise TrajectoryError("unknown_value", "a turn's finish is neither 'stop' nor 'length'")
    return [
        Turn(observed, acted, logprobs, tuple(runs[first:last]), *rest)
        for observed, acted, logprobs, (first, last), *rest in zip(
            _pieces(tokens["observation_ids"], cuts.observation_at),
            _pieces(tokens["action_ids"], cuts.action_at),
            _pieces(tokens["behaviour_logprobs"], cuts.action_at),
            pairwise(cuts.run_at),
            values["turns.finish"],
            values["turns.tool_calls"],
            values["turns.generation_s"],
            values["turns.environment_s"],
            values["turns.engine_incarnation"],
            _heads(columns, "head_ids", cuts),
            _heads(columns, "head_logprobs", cuts),
            strict=True,
        )
    ]


def _heads(columns: Columns, name: str, cuts: Cuts) -> Iterator[npt.NDArray[Any] | None]:
    """The heads of each turn [m, K], or None for each."""
    if columns.head_tokens == 0:
        return repeat(None, len(cuts.action_at) - 1)
    return _pieces(columns.tokens[name].reshape(-1, columns.head_tokens), cuts.action_at)


def _pieces(tokens: npt.NDArray[Any], starts: list[int]) -> Iterator[npt.NDArray[Any]]:
    return (tokens[start:end] for start, end in pairwise(starts))


def _version_runs(columns: Columns) -> list[VersionRun]:
    values = columns.values
    epochs, steps = values["version_runs.epoch"], values["version_runs.step"]
    known = {pair: PolicyVersion(*pair) for pair in set(zip(epochs, steps, strict=True))}
    versions = map(known.__getitem__, zip(epochs, steps, strict=True))
    return list(map(VersionRun, versions, values["version_runs.length_tokens"]))


def _reward_parts(columns: Columns) -> list[dict[str, float]]:
    names, values = columns.values["reward_parts.name"], columns.values["reward_parts.value"]
    spans = pairwise(columns.offsets["reward_parts"])
    parts = [dict(zip(names[a:b], values[a:b], strict=True)) for a, b in spans]
    if sum(map(len, parts)) < len(names):
        raise TrajectoryError("duplicate_reward_part", "a reward part occurs twice")
    return parts


def _sampling(columns: Columns) -> list[SamplingParameters]:
    values, spans = columns.values, pairwise(columns.offsets["stop_token_ids"])
    return [
        SamplingParameters(
            temperature, limit, tuple(values["stop_token_ids"][a:b]), columns.head_tokens
        )
        for temperature, limit, (a, b) in zip(
            values["temperature"], values["max_turn_tokens"], spans, strict=True
        )
    ]


def enum_value(kind: type[_Enum], name: str) -> _Enum:
    """The value of that name. Raises TrajectoryError "unknown_value"."""
    try:
        return kind(name)
    except ValueError as error:
        raise TrajectoryError("unknown_value", f"{kind.__name__} {name[:40]!r}") from error
