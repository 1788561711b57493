"""The records: what a turn refuses, and how a trajectory flattens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trajectory.record import (
    EndReason,
    SamplingParameters,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionRun,
)
from correction.errors import TrajectoryError
from correction.versions import PolicyVersion, VersionSpan

HEAD_TOKENS = 3
Shape = list[tuple[int, list[int]]]
"""For each turn: observed tokens, and the lengths of its version runs."""

shapes = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    min_size=1,
    max_size=5,
)


def trajectory_of(
    shape: Shape, end_reason: EndReason = EndReason.DONE, head_tokens: int = 0
) -> Trajectory:
    """Every token id, logprob and step is its own, so that a misplaced one shows."""
    fresh = iter(range(10**6))
    step = iter(range(10**6))
    turns = []
    for observed, lengths in shape:
        sampled = sum(lengths)
        turns.append(
            Turn(
                np.array([next(fresh) for _ in range(observed)], np.int32),
                np.array([next(fresh) for _ in range(sampled)], np.int32),
                np.array([-1 - next(fresh) for _ in range(sampled)], np.float32),
                tuple(VersionRun(PolicyVersion(0, next(step)), length) for length in lengths),
                "stop",
                **heads_of(fresh, sampled, head_tokens),
            )
        )
    sampling = SamplingParameters(head_tokens=head_tokens)
    return Trajectory("g/0", "g", 0, tuple(turns), 1.0, {}, end_reason, sampling)


def heads_of(fresh: Iterator[int], tokens: int, head_tokens: int) -> dict[str, Any]:
    if head_tokens == 0:
        return {}
    ids = np.array([next(fresh) for _ in range(tokens * head_tokens)]).reshape(tokens, -1)
    return {"head_ids": ids.astype(np.int32), "head_logprobs": (-1 - ids).astype(np.float32)}


@settings(deadline=None)
@given(shapes)
def test_flat_keeps_every_token_in_context_order(shape: Shape) -> None:
    trajectory = trajectory_of(shape)
    flat = trajectory.flat()
    pieces = [ids for turn in trajectory.turns for ids in (turn.observation_ids, turn.action_ids)]
    assert flat.token_ids.tolist() == np.concatenate(pieces).tolist()
    assert len(flat.token_ids) == trajectory.context_tokens


@settings(deadline=None)
@given(shapes)
def test_the_action_mask_is_true_on_exactly_the_sampled_tokens(shape: Shape) -> None:
    trajectory = trajectory_of(shape)
    flat = trajectory.flat()
    sampled = np.concatenate([turn.action_ids for turn in trajectory.turns])
    assert flat.token_ids[flat.action_mask].tolist() == sampled.tolist()
    assert flat.action_mask.sum() == trajectory.action_tokens


@settings(deadline=None)
@given(shapes)
def test_observed_tokens_have_no_logprob_no_version_and_no_turn(shape: Shape) -> None:
    flat = trajectory_of(shape).flat()
    observed = ~flat.action_mask
    assert (flat.behaviour_logprobs[observed] == 0).all()
    assert (flat.behaviour_steps[observed] == -1).all()
    assert (flat.turn_ids[observed] == -1).all()


@settings(deadline=None)
@given(shapes)
def test_sampled_tokens_keep_their_logprob_version_and_turn(shape: Shape) -> None:
    trajectory = trajectory_of(shape)
    flat = trajectory.flat()
    logprobs, steps, turn_ids = [], [], []
    for number, turn in enumerate(trajectory.turns):
        logprobs += turn.behaviour_logprobs.tolist()
        turn_ids += [number] * len(turn.action_ids)
        for run in turn.version_runs:
            steps += [run.version.step] * run.length_tokens
    assert flat.behaviour_logprobs[flat.action_mask].tolist() == logprobs
    assert flat.behaviour_steps[flat.action_mask].tolist() == steps
    assert flat.turn_ids[flat.action_mask].tolist() == turn_ids


@settings(deadline=None)
@given(shapes)
def test_sampled_tokens_keep_their_head_and_observed_ones_have_none(shape: Shape) -> None:
    trajectory = trajectory_of(shape, head_tokens=HEAD_TOKENS)
    flat = trajectory.flat()
    assert flat.head_ids is not None
    assert flat.head_logprobs is not None
    assert flat.head_ids.shape == flat.head_logprobs.shape == (len(flat.token_ids), HEAD_TOKENS)
    ids = np.concatenate([turn.head_ids for turn in trajectory.turns if turn.head_ids is not None])
    np.testing.assert_array_equal(flat.head_ids[flat.action_mask], ids)
    np.testing.assert_array_equal(flat.head_logprobs[flat.action_mask], -1.0 - ids)
    assert (flat.head_ids[~flat.action_mask] == -1).all()
    assert (flat.head_logprobs[~flat.action_mask] == -np.inf).all()
    assert trajectory.head_bytes == trajectory.action_tokens * HEAD_TOKENS * 8
    assert (trajectory_of(shape).flat().head_ids, trajectory_of(shape).head_bytes) == (None, 0)


@settings(deadline=None)
@given(shapes)
def test_the_version_span_is_that_of_the_flat_versions(shape: Shape) -> None:
    trajectory = trajectory_of(shape)
    steps = trajectory.flat().behaviour_steps
    steps = steps[steps >= 0]
    span = VersionSpan(PolicyVersion(0, int(steps.min())), PolicyVersion(0, int(steps.max())))
    assert trajectory.version_span == span
    assert TrajectoryGroup("r", "g", "e", "t", 1, (trajectory,)).version_span == span


@pytest.mark.parametrize(
    ("reason", "observed", "acted", "logprobs", "length"),
    [
        ("empty_action", [1], [], [], 0),
        ("length_mismatch", [1], [1, 2], [-1.0], 2),
        ("missing_version", [1], [1, 2], [-1.0, -1.0], 1),
        ("missing_version", [1], [1, 2], [-1.0, -1.0], 3),
        ("bad_shape", [[1]], [1, 2], [-1.0, -1.0], 2),
    ],
)
def test_a_turn_that_does_not_fit_together_is_refused(
    reason: str, observed: list[int], acted: list[int], logprobs: list[float], length: int
) -> None:
    runs = (VersionRun(PolicyVersion(0, 0), length),)
    with pytest.raises(TrajectoryError) as caught:
        Turn(
            np.array(observed, np.int32),
            np.array(acted, np.int32),
            np.array(logprobs, np.float32),
            runs,
            "stop",
        )
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("reason", "heads"),
    [
        ("bad_head", {"head_ids": [[1], [2]]}),
        ("bad_head", {"head_logprobs": [[-1.0], [-1.0]]}),
        ("bad_shape", {"head_ids": [1, 2], "head_logprobs": [-1.0, -1.0]}),
        ("bad_shape", {"head_ids": [[1], [2]], "head_logprobs": [[-1.0, -2.0]] * 2}),
        ("length_mismatch", {"head_ids": [[1]], "head_logprobs": [[-1.0]]}),
        ("length_mismatch", {"head_ids": [[], []], "head_logprobs": [[], []]}),
    ],
)
def test_heads_that_do_not_fit_the_turn_are_refused(reason: str, heads: dict[str, Any]) -> None:
    whole = trajectory_of([(1, [2])]).turns[0]
    changes: dict[str, Any] = {name: np.array(values) for name, values in heads.items()}
    with pytest.raises(TrajectoryError) as caught:
        replace(whole, **changes)
    assert caught.value.reason == reason


@pytest.mark.parametrize("asked", [0, 2])
def test_a_turn_with_another_head_than_was_asked_for_is_refused(asked: int) -> None:
    made = trajectory_of([(1, [2])], head_tokens=HEAD_TOKENS)
    with pytest.raises(TrajectoryError, match="length_mismatch"):
        replace(made, sampling=SamplingParameters(head_tokens=asked))


def test_arrays_of_a_turn_cannot_be_changed() -> None:
    turn = trajectory_of([(2, [3])], head_tokens=HEAD_TOKENS).turns[0]
    heads = (turn.head_ids, turn.head_logprobs)
    for array in (turn.observation_ids, turn.action_ids, turn.behaviour_logprobs, *heads):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("reason", EndReason)
def test_only_a_done_episode_is_terminated(reason: EndReason) -> None:
    trajectory = trajectory_of([(1, [1])], reason)
    assert trajectory.terminated == (reason is EndReason.DONE)
    assert trajectory.truncated != trajectory.terminated
