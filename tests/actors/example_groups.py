"""Groups for the tests of the codec: arbitrary valid ones, and small ones to break on purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from actors.trajectory.account import GroupAccount, GroupCosts
from actors.trajectory.codec import decode_group
from actors.trajectory.columns import REASONS
from actors.trajectory.head import padded_head
from actors.trajectory.record import (
    DropReason,
    EndReason,
    KvMode,
    SamplingParameters,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionRun,
)
from correction.errors import TrajectoryError
from correction.group_filter import GroupOutcome
from correction.versions import PolicyVersion

LEARNER = PolicyVersion(3, 1000)

text = st.text(max_size=12)
seconds = st.floats(0, 1e9)
finite = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.floats(-(2.0**100), 0, width=32)
token_ids = st.integers(0, 2**31 - 1)
versions = st.builds(PolicyVersion, st.integers(0, 2), st.integers(0, 2**40))


@dataclass(frozen=True)
class Sampled:
    """What an engine tells of m sampled tokens; arrays as in `Turn`."""

    action_ids: npt.NDArray[np.int32]
    behaviour_logprobs: npt.NDArray[np.float32]
    head_ids: npt.NDArray[np.int32] | None = None
    head_logprobs: npt.NDArray[np.float32] | None = None


def sampled_with_heads(seed: int, tokens: int, head_tokens: int, vocabulary: int = 5) -> Sampled:
    """Tokens sampled from made-up distributions, and the heads of these; short ones if need be."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, (tokens, vocabulary)).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1, kind="stable").astype(np.int32)[:, :head_tokens]
    heads = padded_head(ids, np.take_along_axis(logprobs, ids, axis=1), head_tokens)
    actions = random.integers(0, vocabulary, tokens)
    behaviour = np.minimum(logprobs[np.arange(tokens), actions], 0)
    return Sampled(actions.astype(np.int32), behaviour, heads[0], np.minimum(heads[1], 0))


@st.composite
def sampled_tokens(draw: st.DrawFn, tokens: int, head_tokens: int) -> Sampled:
    if head_tokens:
        return sampled_with_heads(draw(st.integers(0, 2**32)), tokens, head_tokens)
    return Sampled(
        np.array(draw(st.lists(token_ids, min_size=tokens, max_size=tokens)), np.int32),
        np.array(draw(st.lists(logprobs, min_size=tokens, max_size=tokens)), np.float32),
    )


@st.composite
def turns(draw: st.DrawFn, head_tokens: int) -> Turn:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    return Turn(
        observation_ids=np.array(draw(st.lists(token_ids, max_size=5)), np.int32),
        **vars(draw(sampled_tokens(sum(lengths), head_tokens))),
        version_runs=tuple(VersionRun(draw(versions), length) for length in lengths),
        finish=draw(st.sampled_from(["stop", "length"])),
        tool_calls=draw(st.integers(0, 100)),
        generation_s=draw(seconds),
        environment_s=draw(seconds),
        engine_incarnation=draw(text),
    )


@st.composite
def accounts(draw: st.DrawFn) -> GroupAccount:
    trajectories = draw(st.integers(1, 20))
    costs = GroupCosts(
        groups=1,
        trajectories=trajectories,
        truncated=draw(st.integers(0, trajectories)),
        tokens=draw(st.integers(0, 10**9)),
        reward_sum=draw(finite),
        generation_s=draw(seconds),
        environment_s=draw(seconds),
    )
    return GroupAccount(draw(st.sampled_from(GroupOutcome)), costs)


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    group_id = draw(text)
    head_tokens = draw(st.sampled_from([0, 1, 3, 7]))
    members = draw(st.lists(st.integers(0, 20), max_size=4, unique=True))
    failures = draw(st.dictionaries(st.sampled_from(DropReason), st.integers(1, 9), max_size=3))
    failures[DropReason.ENGINE_ERROR] = max([0, *members]) + 1  # room for the largest member
    account = None if members else draw(st.none() | accounts())
    trajectories = tuple(
        Trajectory(
            trajectory_id=f"{draw(text)}/{member}",
            group_id=group_id,
            member=member,
            turns=tuple(draw(st.lists(turns(head_tokens), min_size=1, max_size=3))),
            reward=draw(finite),
            reward_parts=draw(st.dictionaries(text, finite, max_size=3)),
            end_reason=draw(st.sampled_from(EndReason)),
            sampling=SamplingParameters(
                temperature=draw(st.floats(1e-3, 10)),
                max_turn_tokens=draw(st.integers(1, 1000)),
                stop_token_ids=tuple(draw(st.lists(token_ids, max_size=3))),
                head_tokens=head_tokens,
            ),
            kv_mode=draw(st.sampled_from(KvMode)),
            started_at_s=draw(seconds),
            duration_s=draw(seconds),
        )
        for member in members
    )
    return TrajectoryGroup(
        run_id=draw(text),
        group_id=group_id,
        environment=draw(text),
        task_id=draw(text),
        expected_size=len(members)
        + sum(failures.values())
        + (account.costs.trajectories if account else 0),
        trajectories=trajectories,
        failures=failures,
        failed_tokens=draw(
            st.dictionaries(st.sampled_from(DropReason), st.integers(0, 10**6), max_size=3)
        ),
        filtered=account,
    )


def turn(**changes: object) -> Turn:
    base = Turn(
        observation_ids=np.array([5, 6], np.int32),
        action_ids=np.array([7, 8, 9], np.int32),
        behaviour_logprobs=np.array([-0.5, 0.0, -2.0], np.float32),
        version_runs=(VersionRun(PolicyVersion(0, 1), 2), VersionRun(PolicyVersion(0, 2), 1)),
        finish="stop",
    )
    return replace(base, **cast("dict[str, Any]", changes))


def trajectory(member: int = 0, **changes: object) -> Trajectory:
    base = Trajectory(
        trajectory_id=f"g/{member}",
        group_id="g",
        member=member,
        turns=(turn(), turn()),
        reward=1.0,
        reward_parts={"answer": 1.0},
        end_reason=EndReason.DONE,
        sampling=SamplingParameters(1.0, 16, (2,)),
    )
    return replace(base, **cast("dict[str, Any]", changes))


def group_of(*trajectories: Trajectory, **changes: object) -> TrajectoryGroup:
    base = TrajectoryGroup("run", "g", "calculator", "t", len(trajectories), trajectories)
    return replace(base, **cast("dict[str, Any]", changes))


def as_plain(value: object) -> object:
    """A record as nested comparable values, arrays with their dtype and exact bytes."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, (tuple, list)):
        return [as_plain(item) for item in value]
    if isinstance(value, (Trajectory, TrajectoryGroup, Turn)):
        return [as_plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


def decode(data: bytes, group: TrajectoryGroup) -> TrajectoryGroup:
    return decode_group(data, run_id=group.run_id, learner_version=LEARNER)


def reason_of(data: bytes, **changes: object) -> str:
    arguments = {"run_id": "run", "learner_version": LEARNER} | changes
    with pytest.raises(TrajectoryError) as caught:
        decode_group(data, **cast("dict[str, Any]", arguments))
    assert caught.value.reason in REASONS
    assert len(str(caught.value)) < 600
    return caught.value.reason
