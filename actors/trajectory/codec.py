"""Trajectory groups as bytes and back: the only door by which trajectories cross a process border.

Contract
    `decode_group(encode_group(group), ...)` is the same group; anything else that is offered to
    `decode_group` raises TrajectoryError with a reason of `columns.REASONS` or is a valid group.
    Nothing is unpickled. Decoded arrays share memory with the bytes, which they keep alive and
    which must not change any more.

`schema.py` says what is on the wire; `writing.py` makes it from records; `frame.py` guards the
bytes, `columns.py` the values; `reading.py` makes records of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from actors.trajectory.account import account_fields, read_account
from actors.trajectory.columns import check_columns, take_apart
from actors.trajectory.frame import MAX_GROUP_BYTES, close_frame, open_frame
from actors.trajectory.reading import enum_value, read_trajectories
from actors.trajectory.record import DropReason, TrajectoryGroup
from actors.trajectory.schema import GROUP_KEY
from actors.trajectory.writing import group_arrays, schema_of
from correction.errors import TrajectoryError
from correction.versions import PolicyVersion

_MAX_GROUP_SIZE = 2**31 - 1
_NAMES = ("run_id", "group_id", "environment", "task_id")


def encode_group(group: TrajectoryGroup) -> bytes:
    """A group as a framed Arrow IPC stream.

    Values are judged where they are consumed; here only what cannot be written is refused:
    TrajectoryError "foreign_member", "unencodable" or "oversize".
    """
    for trajectory in group.trajectories:
        if trajectory.group_id != group.group_id:
            detail = f"trajectory of group {trajectory.group_id!r} in group {group.group_id!r}"
            raise TrajectoryError("foreign_member", detail)
    try:
        layout = schema_of(group.trajectories)
        schema = layout.with_metadata({**layout.metadata, GROUP_KEY: _description(group)})
        batch = pa.RecordBatch.from_arrays(group_arrays(group.trajectories, layout), schema=schema)
        return close_frame(schema, batch)
    except (pa.ArrowException, OverflowError, TypeError, UnicodeError) as error:
        raise TrajectoryError("unencodable", f"{type(error).__name__}: {error}"[:200]) from error


def decode_group(
    data: bytes | memoryview,
    *,
    run_id: str,
    learner_version: PolicyVersion | None,
    max_bytes: int = MAX_GROUP_BYTES,
) -> TrajectoryGroup:
    """The group that `data` holds, validated in full.

    run_id: data of another run is refused. learner_version: newest version that can exist; data
    of a newer one are refused; None skips the test (reading a log). max_bytes: size limit.
    Raises TrajectoryError and nothing else for whatever the bytes are.
    """
    schema, batch = open_frame(data, max_bytes)
    group = _read_description((schema.metadata or {}).get(GROUP_KEY, b""))
    if group["run_id"] != run_id:
        raise TrajectoryError("wrong_run", f"run {group['run_id'][:80]!r}, expected {run_id!r}")
    columns = take_apart(batch)
    _check_members(columns.values, group)
    if batch.num_rows == 0:
        return TrajectoryGroup(**group, trajectories=())
    cuts = check_columns(columns, learner_version)
    return TrajectoryGroup(**group, trajectories=read_trajectories(columns, cuts))


def _description(group: TrajectoryGroup) -> bytes:
    fields: dict[str, object] = {name: getattr(group, name) for name in _NAMES}
    fields |= {
        "expected_size": group.expected_size,
        "failures": dict(group.failures),
        "failed_tokens": dict(group.failed_tokens),
        "filtered": account_fields(group.filtered) if group.filtered else None,
    }
    return json.dumps(fields).encode()


def _read_description(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrajectoryError("bad_group", "the group's description is not JSON") from error
    if not isinstance(fields, dict) or not all(type(fields.get(name)) is str for name in _NAMES):
        raise TrajectoryError("bad_group", f"{', '.join(_NAMES)} must be strings")
    return {name: fields[name] for name in _NAMES} | {
        "expected_size": _count(fields.get("expected_size")),
        "failures": _counts(fields.get("failures")),
        "failed_tokens": _counts(fields.get("failed_tokens")),
        "filtered": None if fields.get("filtered") is None else read_account(fields["filtered"]),
    }


def _counts(value: object) -> dict[DropReason, int]:
    if not isinstance(value, dict):
        raise TrajectoryError("bad_group", "failures and failed_tokens must be objects")
    return {enum_value(DropReason, reason): _count(count) for reason, count in value.items()}


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_GROUP_SIZE:
        raise TrajectoryError("bad_group", "a size or a count is not an integer in range")
    return value


def _check_members(values: Mapping[str, list[Any]], group: Mapping[str, Any]) -> None:
    """Every rollout that was issued is accounted for exactly once."""
    expected, failed = group["expected_size"], sum(group["failures"].values())
    members, ids = values["member"], values["trajectory_id"]
    filtered = group["filtered"].costs.trajectories if group["filtered"] else 0
    if filtered and members:
        raise TrajectoryError("bad_group", "a filtered group has survivors: it is dropped whole")
    if expected < 1 or not all(0 <= member < expected for member in members):
        raise TrajectoryError("unknown_member", f"a member outside a group of {expected}")
    if len(set(members)) < len(members) or len(set(ids)) < len(ids):
        raise TrajectoryError("duplicate_member", "a member or trajectory id occurs twice")
    if len(members) + filtered + failed != expected:
        detail = f"{len(members) + filtered} survivors and {failed} failures of {expected} issued"
        raise TrajectoryError("unaccounted_members", detail)
    if any(group_id != group["group_id"] for group_id in values["group_id"]):
        raise TrajectoryError("foreign_member", "a trajectory names another group")
