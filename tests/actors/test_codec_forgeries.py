"""Hostile bytes: damaged, or forged with a right checksum. A typed error or a valid group."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trajectory.codec import encode_group
from actors.trajectory.columns import REASONS
from actors.trajectory.frame import close_frame, open_frame
from actors.trajectory.record import SamplingParameters, TrajectoryGroup
from actors.trajectory.schema import GROUP_KEY, VERSION_KEY
from correction.errors import TrajectoryError
from tests.actors.example_groups import (
    LEARNER,
    as_plain,
    decode,
    group_of,
    groups,
    reason_of,
    trajectory,
)

MAX_BYTES = 10**7

MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "delete", "insert", "cut"]),
        st.integers(0, 2**20),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, where, piece in edits:
        at = where % (len(data) + 1)
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (piece[0] or 1)]) + data[at + 1 :]
        elif kind == "delete":
            data = data[:at] + data[at + len(piece) :]
        elif kind == "insert":
            data = data[:at] + piece + data[at:]
        elif kind == "cut":
            data = data[:at]
    return data


def signed(stream: bytes) -> bytes:
    """A stream with a trailer whose checksum is right, as a hostile writer would make it."""
    trailer = (b"LGW1", zlib.crc32(stream).to_bytes(4, "little"), len(stream).to_bytes(8, "little"))
    return stream + b"".join(trailer)


def outcome_of(data: bytes, group: TrajectoryGroup) -> TrajectoryGroup | str:
    try:
        return decode(data, group)
    except TrajectoryError as error:
        return error.reason


@settings(max_examples=300, deadline=None)
@given(group=groups(), edits=MUTATIONS)
def test_damaged_bytes_are_refused_or_are_the_same_group(
    group: TrajectoryGroup, edits: list[tuple[str, int, bytes]]
) -> None:
    data = encode_group(group)
    damaged = mutate(data, edits)
    outcome = outcome_of(damaged, group)
    if isinstance(outcome, str):
        assert outcome in REASONS
    else:
        assert damaged == data
        assert as_plain(outcome) == as_plain(group)


@settings(max_examples=300, deadline=None)
@given(group=groups(), edits=MUTATIONS)
def test_forged_bytes_are_refused_or_are_a_valid_group(
    group: TrajectoryGroup, edits: list[tuple[str, int, bytes]]
) -> None:
    """With a right checksum only validation is left: what passes must obey every rule."""
    forged = signed(mutate(encode_group(group)[:-16], edits))
    outcome = outcome_of(forged, group)
    if isinstance(outcome, str):
        assert outcome in REASONS
        return
    assert as_plain(decode(encode_group(outcome), group)) == as_plain(outcome)
    for turn in [turn for member in outcome.trajectories for turn in member.turns]:
        assert np.isfinite(turn.behaviour_logprobs).all()
        assert (turn.behaviour_logprobs <= 0).all()
        assert (turn.action_ids >= 0).all()
        if turn.head_ids is not None and turn.head_logprobs is not None:
            assert (np.exp(turn.head_logprobs).sum(axis=1) < 1.01).all()
            assert ((turn.head_ids == -1) == (turn.head_logprobs == -np.inf)).all()
            within = turn.head_ids == turn.action_ids[:, None]
            assert (within.sum(axis=1) <= 1).all()
            said = np.where(within, turn.head_logprobs, 0).sum(axis=1)[within.any(axis=1)]
            own = turn.behaviour_logprobs[within.any(axis=1)]
            np.testing.assert_allclose(said, own, atol=1e-4)
        assert all(run.version <= LEARNER for run in turn.version_runs)


def opened() -> tuple[pa.Schema, pa.RecordBatch]:
    return open_frame(encode_group(group_of(trajectory())), MAX_BYTES)


def framed(schema: pa.Schema, batch: pa.RecordBatch) -> bytes:
    return close_frame(schema, batch)


def with_column(name: str, column: pa.Array) -> bytes:
    schema, batch = opened()
    at = batch.schema.get_field_index(name)
    return framed(schema, batch.set_column(at, batch.schema.field(name), column))


def with_items(name: str, edit: Callable[[list[Any]], list[Any]]) -> bytes:
    _, batch = opened()
    values = edit(batch.column(name).to_pylist())
    return with_column(name, pa.array(values, batch.schema.field(name).type))


def with_group(**changes: object) -> bytes:
    schema, batch = opened()
    description = json.loads(schema.metadata[GROUP_KEY]) | changes
    metadata = {**schema.metadata, GROUP_KEY: json.dumps(description).encode()}
    return framed(schema.with_metadata(metadata), batch)


def edit_turn(**changes: object) -> bytes:
    return with_items("turns", lambda rows: [[rows[0][0] | changes, *rows[0][1:]]])


def with_offsets(start: int, end: int) -> bytes:
    """Offsets that pyarrow would not build, put into the bytes of a list of 4321 stop tokens."""
    stops = SamplingParameters(stop_token_ids=(2,) * 4321)
    stream = encode_group(group_of(trajectory(sampling=stops)))[:-16]
    body = stream.rindex(np.array([0, 4321], np.int32).tobytes())
    forged = np.array([start, end], np.int32).tobytes()
    return signed(stream[:body] + forged + stream[body + len(forged) :])


FORGERIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "fewer logprobs than tokens": (
        "length_mismatch",
        lambda: with_items("behaviour_logprobs", lambda rows: [rows[0][:-1]]),
    ),
    "more observed tokens than the turns say": (
        "length_mismatch",
        lambda: with_items("observation_ids", lambda rows: [[*rows[0], 1]]),
    ),
    "negative count": ("length_mismatch", lambda: edit_turn(observation_tokens=-1)),
    "turn without sampled tokens": ("empty_action", lambda: edit_turn(action_tokens=0)),
    "no version at all": ("missing_version", lambda: without_versions()),
    "version for too few tokens": (
        "missing_version",
        lambda: edit_run(length_tokens=1),
    ),
    "negative step": ("bad_version", lambda: edit_run(step=-1)),
    "negative epoch": ("bad_version", lambda: edit_run(epoch=-1)),
    "null in a list": (
        "null_value",
        lambda: with_items("action_ids", lambda r: [[None, *r[0][1:]]]),
    ),
    "null in a struct": ("null_value", lambda: edit_turn(tool_calls=None)),
    "null row": ("null_value", lambda: with_items("reward_parts", lambda rows: [None])),
    "offsets that skip values": ("bad_offsets", lambda: with_offsets(1, 4321)),
    "offsets that run backwards": ("bad_stream", lambda: with_offsets(0, -4)),
    "offsets beyond the values": ("bad_stream", lambda: with_offsets(0, 10**6)),
    "reward part twice": (
        "duplicate_reward_part",
        lambda: with_items("reward_parts", lambda rows: [rows[0] * 2]),
    ),
    "another group's trajectory": (
        "foreign_member",
        lambda: with_items("group_id", lambda rows: ["h"]),
    ),
    "unknown KV mode": ("unknown_value", lambda: with_items("kv_mode", lambda rows: ["lost"])),
    "group of nobody": ("unknown_member", lambda: with_group(expected_size=0)),
    "size that is no integer": ("bad_group", lambda: with_group(expected_size=True)),
    "size that is no int32": ("bad_group", lambda: with_group(expected_size=2**31)),
    "failures that are a list": ("bad_group", lambda: with_group(failures=[1])),
    "description without end": ("bad_group", lambda: with_metadata({GROUP_KEY: b"[" * 30_000})),
    "no description": ("bad_group", lambda: with_metadata({GROUP_KEY: b""})),
    "newer schema": ("unknown_schema", lambda: with_metadata({VERSION_KEY: b"99"})),
    "no schema version": ("unknown_schema", lambda: with_metadata({VERSION_KEY: b""})),
    "missing column": ("wrong_columns", lambda: without_column("kv_mode")),
    "extra column": ("wrong_columns", lambda: with_extra_column()),
    "column of another type": ("wrong_columns", lambda: with_other_type()),
    "compressed buffers": ("compressed", lambda: compressed()),
    "two batches": ("bad_stream", lambda: stream_of(batches=2)),
    "no batch": ("bad_stream", lambda: stream_of(batches=0)),
    "bytes after the end": ("bad_stream", lambda: signed(stream_of(batches=1)[:-16] + bytes(8))),
    "not Arrow": ("bad_stream", lambda: signed(b"\x80\x04\x95" + bytes(200))),
    "nothing": ("bad_stream", lambda: signed(b"")),
}


def edit_run(**changes: object) -> bytes:
    return with_items("version_runs", lambda rows: [[rows[0][0] | changes, *rows[0][1:]]])


def without_versions() -> bytes:
    schema, batch = opened()
    runs = pa.array([[]], batch.schema.field("version_runs").type)
    rows = [[item | {"version_runs": 0} for item in batch.column("turns").to_pylist()[0]]]
    turns_column = pa.array(rows, batch.schema.field("turns").type)
    batch = batch.set_column(batch.schema.get_field_index("version_runs"), "version_runs", runs)
    return framed(
        schema, batch.set_column(batch.schema.get_field_index("turns"), "turns", turns_column)
    )


def with_metadata(changes: dict[bytes, bytes]) -> bytes:
    schema, batch = opened()
    return framed(schema.with_metadata({**schema.metadata, **changes}), batch)


def without_column(name: str) -> bytes:
    schema, batch = opened()
    at = schema.get_field_index(name)
    return framed(schema.remove(at), batch.remove_column(at))


def with_extra_column() -> bytes:
    schema, batch = opened()
    extra = pa.array([1])
    return framed(schema.append(pa.field("extra", extra.type)), batch.append_column("extra", extra))


def with_other_type() -> bytes:
    schema, batch = opened()
    at = schema.get_field_index("member")
    field = schema.field("member").with_type(pa.int64())
    return framed(schema.set(at, field), batch.set_column(at, field, pa.array([0], pa.int64())))


def compressed() -> bytes:
    schema, batch = opened()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(batch)
    return signed(sink.getvalue().to_pybytes())


def stream_of(batches: int) -> bytes:
    schema, batch = opened()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for _ in range(batches):
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    return signed(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_messages_are_refused_by_name(name: str) -> None:
    reason, forge = FORGERIES[name]
    assert reason_of(forge()) == reason


def test_extension_types_are_refused_before_anybody_can_load_them() -> None:
    loaded = []

    class Trap(pa.ExtensionType):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(pa.string(), "lagwise.test.trap")

        def __arrow_ext_serialize__(self) -> bytes:
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage_type: object, serialized: bytes) -> pa.DataType:
            loaded.append(serialized)
            return cls()

    pa.register_extension_type(Trap())
    try:
        schema, batch = opened()
        at = schema.get_field_index("kv_mode")
        field = pa.field("kv_mode", Trap(), nullable=False)
        column = pa.ExtensionArray.from_storage(Trap(), batch.column("kv_mode"))
        data = framed(schema.set(at, field), batch.set_column(at, field, column))
        loaded.clear()
        assert reason_of(data) == "unknown_schema"
        assert loaded == []
    finally:
        pa.unregister_extension_type("lagwise.test.trap")
