"""The codec: what goes in comes out; values that break a rule are refused by name."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from actors.trajectory.codec import decode_group, encode_group
from actors.trajectory.record import (
    DropReason,
    SamplingParameters,
    Trajectory,
    TrajectoryGroup,
    VersionRun,
)
from actors.trajectory.schema import GROUP_KEY, SCHEMA
from correction.errors import TrajectoryError
from correction.versions import PolicyVersion
from tests.actors.example_groups import (
    LEARNER,
    as_plain,
    decode,
    group_of,
    groups,
    reason_of,
    trajectory,
    turn,
)


@settings(deadline=None)
@given(groups())
def test_decoding_gives_back_exactly_what_was_encoded(group: TrajectoryGroup) -> None:
    decoded = decode(encode_group(group), group)
    assert as_plain(decoded) == as_plain(group)
    for member, original in zip(decoded.trajectories, group.trajectories, strict=True):
        assert as_plain(flat_arrays(member)) == as_plain(flat_arrays(original))


def flat_arrays(trajectory: Trajectory) -> list[object]:
    flat = trajectory.flat()
    return [getattr(flat, name) for name in flat.__dataclass_fields__]


BAD_RECORDS: dict[str, tuple[str, TrajectoryGroup]] = {
    "NaN logprob": (
        "non_finite_logprob",
        group_of(
            trajectory(turns=(turn(behaviour_logprobs=np.array([-1, np.nan, -1], np.float32)),))
        ),
    ),
    "infinite logprob": (
        "non_finite_logprob",
        group_of(trajectory(turns=(turn(behaviour_logprobs=np.array([-np.inf, -1, -1])),))),
    ),
    "logprob above 0": (
        "positive_logprob",
        group_of(trajectory(turns=(turn(behaviour_logprobs=np.array([-1, 1e-6, -1])),))),
    ),
    "NaN reward": ("non_finite_reward", group_of(trajectory(reward=float("nan")))),
    "infinite reward part": (
        "non_finite_reward",
        group_of(trajectory(reward_parts={"answer": float("inf")})),
    ),
    "version of a newer step": (
        "future_version",
        group_of(trajectory(turns=(turn(version_runs=(VersionRun(PolicyVersion(3, 1001), 3),)),))),
    ),
    "version of a newer epoch": (
        "future_version",
        group_of(trajectory(turns=(turn(version_runs=(VersionRun(PolicyVersion(4, 0), 3),)),))),
    ),
    "version run without length": (
        "missing_version",
        group_of(
            trajectory(
                turns=(
                    turn(
                        version_runs=(
                            VersionRun(PolicyVersion(0, 1), 4),
                            VersionRun(PolicyVersion(0, 1), -1),
                        )
                    ),
                )
            )
        ),
    ),
    "negative token id": (
        "bad_token_id",
        group_of(trajectory(turns=(turn(observation_ids=np.array([-1], np.int32)),))),
    ),
    "no turns": ("no_turns", group_of(trajectory(turns=()))),
    "negative seconds": ("bad_cost", group_of(trajectory(duration_s=-1.0))),
    "negative tool calls": ("bad_cost", group_of(trajectory(turns=(turn(tool_calls=-1),)))),
    "temperature 0": ("bad_sampling", group_of(trajectory(sampling=SamplingParameters(0.0)))),
    "unknown finish": ("unknown_value", group_of(trajectory(turns=(turn(finish="done"),)))),
    "unknown end reason": ("unknown_value", group_of(trajectory(end_reason="bored"))),
    "missing reward": ("null_value", group_of(trajectory(reward=None))),
    "member outside the group": ("unknown_member", group_of(trajectory(member=1))),
    "negative member": ("unknown_member", group_of(trajectory(member=-1))),
    "member twice": (
        "duplicate_member",
        group_of(trajectory(), trajectory(trajectory_id="other")),
    ),
    "trajectory id twice": (
        "duplicate_member",
        group_of(trajectory(0), trajectory(1, trajectory_id="g/0")),
    ),
    "member that nobody accounts for": (
        "unaccounted_members",
        group_of(trajectory(), expected_size=2),
    ),
    "failure that was never issued": (
        "unaccounted_members",
        group_of(trajectory(), failures={DropReason.ENGINE_ERROR: 1}),
    ),
    "negative failure count": (
        "bad_group",
        group_of(trajectory(), failures={DropReason.ENGINE_ERROR: -1}),
    ),
    "unknown drop reason": ("unknown_value", group_of(failures={"bad luck": 1}, expected_size=1)),
    "run id that is no text": ("bad_group", group_of(trajectory(), run_id=7)),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_values_that_break_a_rule_are_refused_by_name(name: str) -> None:
    reason, group = BAD_RECORDS[name]
    assert reason_of(encode_group(group)) == reason


def test_data_of_another_run_is_refused() -> None:
    assert reason_of(encode_group(group_of(trajectory())), run_id="other") == "wrong_run"


def test_without_a_learner_version_no_version_is_from_the_future() -> None:
    group = group_of(
        trajectory(turns=(turn(version_runs=(VersionRun(PolicyVersion(9, 9**9), 3),)),))
    )
    decoded = decode_group(encode_group(group), run_id="run", learner_version=None)
    assert decoded.version_span.newest == PolicyVersion(9, 9**9)


def test_the_learner_s_own_version_is_accepted() -> None:
    group = group_of(trajectory(turns=(turn(version_runs=(VersionRun(LEARNER, 3),)),)))
    assert decode(encode_group(group), group).version_span.newest == LEARNER


def test_a_group_without_survivors_still_reports_what_failed() -> None:
    failures = {DropReason.ENVIRONMENT_TIMEOUT: 8}
    group = group_of(expected_size=8, failures=failures, failed_tokens=dict.fromkeys(failures, 40))
    decoded = decode(encode_group(group), group)
    assert decoded.trajectories == ()
    assert decoded.failures == failures
    assert decoded.failed_tokens == {DropReason.ENVIRONMENT_TIMEOUT: 40}


def test_truncated_and_damaged_bytes_are_refused() -> None:
    data = encode_group(group_of(trajectory()))
    assert {reason_of(data[:size]) for size in range(len(data))} == {"truncated"}
    assert reason_of(data + b"\0") == "truncated"
    assert reason_of(data[:100] + bytes([data[100] ^ 1]) + data[101:]) == "bad_checksum"


def test_more_bytes_than_allowed_are_refused_unread() -> None:
    data = encode_group(group_of(trajectory()))
    assert reason_of(data, max_bytes=len(data) - 1) == "oversize"
    decode_group(data, run_id="run", learner_version=LEARNER, max_bytes=len(data))


def test_a_description_that_would_not_be_accepted_is_not_written() -> None:
    with pytest.raises(TrajectoryError, match="oversize"):
        encode_group(group_of(trajectory(), task_id="x" * 2**17))


def test_a_trajectory_of_another_group_is_not_written() -> None:
    with pytest.raises(TrajectoryError, match="foreign_member"):
        encode_group(group_of(trajectory(group_id="h")))


@pytest.mark.parametrize(
    "bad",
    [
        trajectory(member=2**40),
        trajectory(trajectory_id="\ud800"),
        trajectory(reward="high"),
        trajectory(turns=(turn(version_runs=(VersionRun(PolicyVersion(0, 2**70), 3),)),)),
    ],
    ids=["int32 overflow", "lone surrogate", "text as a reward", "int64 overflow"],
)
def test_what_the_columns_cannot_hold_is_a_typed_error(bad: Trajectory) -> None:
    with pytest.raises(TrajectoryError) as caught:
        encode_group(group_of(bad))
    assert caught.value.reason == "unencodable"


def test_any_arrow_reader_can_open_a_group() -> None:
    group = group_of(trajectory())
    table = pa.ipc.open_stream(encode_group(group)).read_all()
    assert table.schema.equals(SCHEMA)
    assert json.loads(table.schema.metadata[GROUP_KEY])["task_id"] == "t"
    assert table.schema.field("duration_s").metadata[b"unit"] == b"s"
    assert table["behaviour_logprobs"].to_pylist() == [[-0.5, 0.0, -2.0] * 2]


def test_decoded_arrays_are_views_of_the_bytes_and_read_only() -> None:
    group = group_of(trajectory())
    data = encode_group(group)
    whole = np.frombuffer(data, np.uint8)
    for decoded in decode(data, group).trajectories[0].turns:
        for array in (decoded.observation_ids, decoded.action_ids, decoded.behaviour_logprobs):
            assert np.shares_memory(array, whole)
            assert not array.flags.writeable


def test_a_memoryview_is_decoded_without_copying_it() -> None:
    group = group_of(trajectory())
    data = b"prefix--" + encode_group(group)
    decoded = decode_group(memoryview(data)[8:], run_id="run", learner_version=LEARNER)
    assert as_plain(decoded) == as_plain(group)
    assert np.shares_memory(
        decoded.trajectories[0].turns[0].action_ids, np.frombuffer(data, np.uint8)
    )


def test_the_fields_say_their_unit_and_shape() -> None:
    for field in SCHEMA:
        assert not field.nullable
        assert field.metadata[b"meaning"]
        assert pa.types.is_list(field.type) == (b"shape" in field.metadata)
        if field.name.endswith("_s"):
            assert field.metadata[b"unit"] == b"s"
