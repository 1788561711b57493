"""Records to columns: the arrays of one group, in the order of its schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actors.trajectory.record import Int64, Trajectory, Turn, VersionRun
from actors.trajectory.schema import HEAD_SCHEMA, REWARD_PART, SCHEMA, TURN, VERSION_RUN

_TYPES = {field.name: field.type for field in HEAD_SCHEMA}
_FIELD_TYPES = {type_: [f.type for f in type_] for type_ in (TURN, VERSION_RUN, REWARD_PART)}
_MAX_OFFSET = 2**31 - 1


def schema_of(trajectories: Sequence[Trajectory]) -> pa.Schema:
    """The schema of a group of these: with heads where any of them has some."""
    return HEAD_SCHEMA if any(t.sampling.head_tokens for t in trajectories) else SCHEMA


def group_arrays(trajectories: Sequence[Trajectory], schema: pa.Schema) -> list[pa.Array]:
    """Columns in the order of the schema, one row a trajectory.

    Raises what pyarrow and NumPy raise for values that their types cannot hold.
    """
    columns = _token_columns(trajectories) | _list_columns(trajectories)
    if schema is HEAD_SCHEMA:
        columns |= _head_columns(trajectories)
    for name, values in _plain_columns(trajectories).items():
        columns[name] = pa.array(values, _TYPES[name])
    return [columns[name] for name in schema.names]


def _token_columns(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    """What is flat over the turns of a trajectory, and the turns that cut it."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    turn_at = _starts(len(trajectory.turns) for trajectory in trajectories)
    observation_at = _starts(len(turn.observation_ids) for turn in turns)[turn_at]
    action_at = _starts(len(turn.action_ids) for turn in turns)[turn_at]
    run_at = _starts(len(turn.version_runs) for turn in turns)[turn_at]
    observation_ids = _joined([turn.observation_ids for turn in turns], np.int32)
    action_ids = _joined([turn.action_ids for turn in turns], np.int32)
    logprobs = _joined([turn.behaviour_logprobs for turn in turns], np.float32)
    runs = _run_array([run for turn in turns for run in turn.version_runs])
    return {
        "observation_ids": _lists("observation_ids", observation_at, observation_ids),
        "action_ids": _lists("action_ids", action_at, action_ids),
        "behaviour_logprobs": _lists("behaviour_logprobs", action_at, logprobs),
        "version_runs": _lists("version_runs", run_at, runs),
        "turns": _lists("turns", turn_at, _turn_array(turns)),
    }


def _head_columns(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    """Heads, row by row flat over the tokens that they belong to."""
    counts = [trajectory.sampling.head_tokens for trajectory in trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    heads = [(turn.head_ids, turn.head_logprobs) for turn in turns]
    at = _starts(t.action_tokens * count for t, count in zip(trajectories, counts, strict=True))
    ids = _joined([ids.ravel() for ids, _ in heads if ids is not None], np.int32)
    logprobs = _joined([values.ravel() for _, values in heads if values is not None], np.float32)
    return {
        "head_tokens": pa.array(counts, pa.int32()),
        "head_ids": _lists("head_ids", at, ids),
        "head_logprobs": _lists("head_logprobs", at, logprobs),
    }


def _list_columns(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    parts = [trajectory.reward_parts for trajectory in trajectories]
    stops = [trajectory.sampling.stop_token_ids for trajectory in trajectories]
    stop_ids = pa.array(list(chain.from_iterable(stops)), pa.int32())
    return {
        "reward_parts": _lists("reward_parts", _starts(map(len, parts)), _part_array(parts)),
        "stop_token_ids": _lists("stop_token_ids", _starts(map(len, stops)), stop_ids),
    }


def _plain_columns(trajectories: Sequence[Trajectory]) -> dict[str, list[object]]:
    direct = ("trajectory_id", "group_id", "member", "reward", "end_reason", "kv_mode")
    columns: dict[str, list[object]] = {
        name: [getattr(trajectory, name) for trajectory in trajectories]
        for name in (*direct, "started_at_s", "duration_s")
    }
    columns["temperature"] = [t.sampling.temperature for t in trajectories]
    columns["max_turn_tokens"] = [t.sampling.max_turn_tokens for t in trajectories]
    return columns


def _lists(name: str, offsets: Int64, items: pa.Array) -> pa.Array:
    if offsets[-1] > _MAX_OFFSET:
        raise OverflowError(f"{name}: {offsets[-1]} values in one group")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32))]
    return pa.Array.from_buffers(_TYPES[name], len(offsets) - 1, buffers, children=[items])


def _starts(lengths: Iterable[int]) -> Int64:
    """Where each piece starts in their concatenation, and where the last one ends."""
    return np.cumsum(np.fromiter(chain((0,), lengths), np.int64))


def _joined(pieces: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike) -> pa.Array:
    return pa.array(np.concatenate(pieces) if pieces else np.empty(0, dtype))


def _run_array(runs: list[VersionRun]) -> pa.Array:
    return _struct(
        VERSION_RUN,
        [run.version.epoch for run in runs],
        [run.version.step for run in runs],
        [run.length_tokens for run in runs],
    )


def _turn_array(turns: list[Turn]) -> pa.Array:
    return _struct(
        TURN,
        [len(turn.observation_ids) for turn in turns],
        [len(turn.action_ids) for turn in turns],
        [len(turn.version_runs) for turn in turns],
        [turn.finish for turn in turns],
        [turn.tool_calls for turn in turns],
        [turn.generation_s for turn in turns],
        [turn.environment_s for turn in turns],
        [turn.engine_incarnation for turn in turns],
    )


def _part_array(parts: list[Mapping[str, float]]) -> pa.Array:
    items = [item for part in parts for item in part.items()]
    return _struct(REWARD_PART, [name for name, _ in items], [value for _, value in items])


def _struct(type_: pa.StructType, *values: Sequence[object]) -> pa.Array:
    types = _FIELD_TYPES[type_]
    arrays = [pa.array(column, field) for column, field in zip(values, types, strict=True)]
    return pa.Array.from_buffers(type_, len(arrays[0]), [None], children=arrays)
