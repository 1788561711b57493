"""Heads on the wire: exact, refused by name when they are wrong, and free where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from actors.trajectory.codec import encode_group
from actors.trajectory.frame import close_frame, open_frame
from actors.trajectory.head import BYTES_PER_HEAD_TOKEN, TOLERANCE_NATS
from actors.trajectory.record import SamplingParameters, Trajectory, TrajectoryGroup, VersionRun
from actors.trajectory.schema import HEAD_SCHEMA, SCHEMA
from correction.versions import PolicyVersion
from tests.actors.example_groups import (
    as_plain,
    decode,
    group_of,
    reason_of,
    sampled_with_heads,
    trajectory,
    turn,
)

NAN, INF = float("nan"), float("inf")
IDS = [[7, 1], [8, -1], [1, 2]]
LOGPROBS = [[-0.5, -1.0], [0.0, -INF], [-0.2, -1.9]]


def with_heads(
    ids: list[list[int]] | None = None, logprobs: list[list[float]] | None = None
) -> TrajectoryGroup:
    """One turn that samples 7, 8 and 9 with logprobs -0.5, 0 and -2."""
    heads = np.array(ids or IDS, np.int32), np.array(logprobs or LOGPROBS, np.float32)
    made = turn(head_ids=heads[0], head_logprobs=heads[1])
    return group_of(headed(made))


def headed(*turns: object, member: int = 0, head_tokens: int = 2) -> Trajectory:
    sampling = SamplingParameters(1.0, 16, (2,), head_tokens)
    return trajectory(member, turns=turns, sampling=sampling)


def test_heads_come_back_exactly_and_are_views_of_the_bytes() -> None:
    group = with_heads()
    data = encode_group(group)
    decoded = decode(data, group)
    assert as_plain(decoded) == as_plain(group)
    made = decoded.trajectories[0].turns[0]
    for array, values in ((made.head_ids, IDS), (made.head_logprobs, LOGPROBS)):
        assert array is not None
        np.testing.assert_array_equal(array, np.array(values, array.dtype))
        assert np.shares_memory(array, np.frombuffer(data, np.uint8))
        assert not array.flags.writeable


BAD_HEADS: dict[str, tuple[str, TrajectoryGroup]] = {
    "id below -1": ("bad_token_id", with_heads(ids=[[7, -2], *IDS[1:]])),
    "NaN": ("non_finite_logprob", with_heads(logprobs=[[-0.5, NAN], *LOGPROBS[1:]])),
    "NaN for padding": (
        "non_finite_logprob",
        with_heads(logprobs=[[-0.5, -1], [0, NAN], [-1, -2]]),
    ),
    "above 0": ("positive_logprob", with_heads(logprobs=[LOGPROBS[0], [1e-6, -INF], [-1, -2]])),
    "infinite": ("positive_logprob", with_heads(logprobs=[[INF, -1], *LOGPROBS[1:]])),
    "token without a probability": ("bad_head", with_heads(ids=[IDS[0], [8, 3], IDS[2]])),
    "probability without a token": ("bad_head", with_heads(ids=[IDS[0], IDS[1], [1, -1]])),
    "padding before tokens": (
        "bad_head",
        with_heads([[-1, 7], *IDS[1:]], [[-INF, -0.5], [0, -INF], [-1, -1]]),
    ),
    "likeliest last": ("bad_head", with_heads(logprobs=[LOGPROBS[0], LOGPROBS[1], [-2.1, -1.9]])),
    "more than everything": ("bad_head", with_heads(logprobs=[[-0.5, -0.5], *LOGPROBS[1:]])),
    "token twice": ("bad_head", with_heads(ids=[[7, 7], *IDS[1:]])),
    "sampled token said otherwise": (
        "head_mismatch",
        with_heads(logprobs=[[-0.5 - 2 * TOLERANCE_NATS, -1.0], *LOGPROBS[1:]]),
    ),
    "sampled token likelier than the last": (
        "head_mismatch",
        with_heads(logprobs=[LOGPROBS[0], LOGPROBS[1], [-0.2, -2.1]]),
    ),
    "sampled token not in a short head": (
        "head_mismatch",
        with_heads(ids=[IDS[0], [4, -1], IDS[2]]),
    ),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_wrong_heads_are_refused_by_name(name: str) -> None:
    reason, group = BAD_HEADS[name]
    assert reason_of(encode_group(group)) == reason


def test_rounding_of_the_sampled_logprob_is_accepted() -> None:
    within = -0.5 - TOLERANCE_NATS / 2
    group = with_heads(logprobs=[[within, -1.0], *LOGPROBS[1:]])
    assert as_plain(decode(encode_group(group), group)) == as_plain(group)


def test_heads_of_a_group_are_of_one_size() -> None:
    one = turn(head_ids=np.array(IDS)[:, :1], head_logprobs=np.array(LOGPROBS)[:, :1])
    two = turn(head_ids=np.array(IDS), head_logprobs=np.array(LOGPROBS))
    mixed = group_of(headed(two), headed(one, member=1, head_tokens=1))
    assert reason_of(encode_group(mixed)) == "bad_sampling"
    some = group_of(trajectory(1), headed(two))
    assert reason_of(encode_group(some)) == "bad_sampling"


def forged(name: str, edit: Callable[[Any], Any]) -> bytes:
    schema, batch = open_frame(encode_group(with_heads()), 10**7)
    at = schema.get_field_index(name)
    column = pa.array([edit(batch.column(at)[0].as_py())], schema.field(at).type)
    return close_frame(schema, batch.set_column(at, schema.field(at), column))


FORGERIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "fewer ids": ("length_mismatch", lambda: forged("head_ids", lambda ids: ids[:-1])),
    "more logprobs": ("length_mismatch", lambda: forged("head_logprobs", lambda lp: [*lp, -1.0])),
    "no heads at all": ("length_mismatch", lambda: forged("head_ids", lambda ids: [])),
    "another K": ("length_mismatch", lambda: forged("head_tokens", lambda k: 3)),
    "K of nothing": ("bad_sampling", lambda: forged("head_tokens", lambda k: 0)),
    "negative K": ("bad_sampling", lambda: forged("head_tokens", lambda k: -2)),
    "huge K": ("length_mismatch", lambda: forged("head_tokens", lambda k: 2**31 - 1)),
    "missing K": ("null_value", lambda: forged("head_tokens", lambda k: None)),
    "missing id": ("null_value", lambda: forged("head_ids", lambda ids: [None, *ids[1:]])),
    "missing heads": ("null_value", lambda: forged("head_logprobs", lambda lp: None)),
    "no logprobs": ("wrong_columns", lambda: without("head_logprobs")),
    "no K": ("wrong_columns", lambda: without("head_tokens")),
}


def without(name: str) -> bytes:
    schema, batch = open_frame(encode_group(with_heads()), 10**7)
    at = schema.get_field_index(name)
    return close_frame(schema.remove(at), batch.remove_column(at))


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_heads_are_refused_by_name(name: str) -> None:
    reason, forge = FORGERIES[name]
    assert reason_of(forge()) == reason


def of_length(tokens: int, head_tokens: int) -> TrajectoryGroup:
    sampled = vars(sampled_with_heads(3, tokens, max(1, head_tokens), vocabulary=200))
    if head_tokens == 0:
        sampled = {**sampled, "head_ids": None, "head_logprobs": None}
    made = turn(**sampled, version_runs=(VersionRun(PolicyVersion(0, 1), tokens),))
    return group_of(headed(made, head_tokens=head_tokens))


def test_a_head_token_costs_eight_bytes_and_no_head_nothing() -> None:
    def per_token(head_tokens: int) -> float:
        many, few = (len(encode_group(of_length(tokens, head_tokens))) for tokens in (2064, 16))
        return (many - few) / 2048

    assert BYTES_PER_HEAD_TOKEN == 8
    assert per_token(0) == 8
    assert per_token(128) == 8 + 128 * BYTES_PER_HEAD_TOKEN
    table = pa.ipc.open_stream(encode_group(of_length(16, 0))).read_all()
    assert table.schema.equals(SCHEMA)


def test_any_arrow_reader_can_open_heads() -> None:
    table = pa.ipc.open_stream(encode_group(with_heads())).read_all()
    assert table.schema.equals(HEAD_SCHEMA)
    assert table["head_tokens"].to_pylist() == [2]
    assert table["head_ids"].to_pylist() == [[7, 1, 8, -1, 1, 2]]
    for name in ("head_tokens", "head_ids", "head_logprobs"):
        assert table.schema.field(name).metadata[b"meaning"]


def test_a_group_knows_the_bytes_of_its_heads() -> None:
    assert with_heads().head_bytes == 3 * 2 * 8
    assert group_of(trajectory()).head_bytes == 0
