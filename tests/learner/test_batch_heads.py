"""Heads reach the micro-batch at their token's place, and only where they were asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.trajectory.record import Trajectory, TrajectoryGroup, Turn
from correction.errors import InputError
from learner.batch import assemble, collate
from tests.learner.learner_ranks import made_up_groups

HEAD_TOKENS = 3


def with_heads(group: TrajectoryGroup, head_tokens: int = HEAD_TOKENS) -> TrajectoryGroup:
    """Every id and logprob is its own in the group; the last place of every head is padding."""
    fresh = iter(range(10**6))

    def headed(turn: Turn) -> Turn:
        shape = (len(turn.action_ids), head_tokens)
        ids = np.array([next(fresh) for _ in range(shape[0] * shape[1])]).reshape(shape)
        logprobs = -1.0 - ids
        ids[:, -1], logprobs[:, -1] = -1, -np.inf
        return replace(
            turn, head_ids=ids.astype(np.int32), head_logprobs=logprobs.astype(np.float32)
        )

    def whole(trajectory: Trajectory) -> Trajectory:
        sampling = replace(trajectory.sampling, head_tokens=head_tokens)
        turns = tuple(headed(turn) for turn in trajectory.turns)
        return replace(trajectory, sampling=sampling, turns=turns)

    return replace(group, trajectories=tuple(map(whole, group.trajectories)))


def test_heads_stand_at_their_token_and_padding_has_none() -> None:
    batch = assemble([with_heads(group) for group in made_up_groups(seed=3)])
    micro = collate(batch, [4, 0, 7], learner_step=3)
    assert micro.head_ids is not None
    assert micro.head_behaviour_logprobs is not None
    assert micro.head_ids.shape == (*micro.token_ids.shape, HEAD_TOKENS)
    assert micro.head_ids.dtype == torch.int64
    assert micro.head_behaviour_logprobs.dtype == torch.float32
    for at, row in enumerate([4, 0, 7]):
        flat = batch.rows[row].tokens
        length = len(flat.token_ids)
        np.testing.assert_array_equal(micro.head_ids[at, :length], flat.head_ids)
        logprobs = micro.head_behaviour_logprobs[at, :length]
        np.testing.assert_array_equal(logprobs, flat.head_logprobs)
    elsewhere = ~micro.action_mask
    assert (micro.head_ids[elsewhere] == -1).all()
    assert torch.isneginf(micro.head_behaviour_logprobs[elsewhere]).all()
    assert (micro.head_ids[micro.action_mask][:, :-1] >= 0).all()


def test_a_filler_has_heads_too() -> None:
    batch = assemble([with_heads(group) for group in made_up_groups(seed=3)])
    micro = collate(batch, [], learner_step=3)
    assert micro.head_ids is not None
    assert micro.head_ids.shape == (*micro.token_ids.shape, HEAD_TOKENS)


def test_without_heads_the_micro_batch_has_none() -> None:
    micro = collate(assemble(made_up_groups(seed=3)), [0, 1], learner_step=3)
    assert (micro.head_ids, micro.head_behaviour_logprobs) == (None, None)


@pytest.mark.parametrize("other", [0, 2])
def test_heads_of_different_sizes_are_no_batch(other: int) -> None:
    first, second, *_ = made_up_groups(seed=3)
    odd = second if other == 0 else with_heads(second, other)
    with pytest.raises(InputError, match="heads of one size"):
        assemble([with_heads(first), odd])
