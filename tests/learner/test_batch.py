from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trajectory.record import Turn, VersionRun
from correction.errors import InputError
from correction.versions import PolicyVersion
from learner.batch import LearnerBatch, assemble, collate, lag_versions, plan
from tests.learner.learner_ranks import made_up_groups

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200))
def test_a_plan_computes_every_row_exactly_once(
    lengths: list[int], ranks: int, budget: int
) -> None:
    made = plan(lengths, ranks, budget)
    rows = [row for mine in made.ranks for micro in mine for row in micro]
    assert sorted(rows) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200))
def test_every_rank_has_the_same_number_of_micro_batches(
    lengths: list[int], ranks: int, budget: int
) -> None:
    made = plan(lengths, ranks, budget)
    assert len(made.ranks) == ranks
    assert len({len(mine) for mine in made.ranks}) == 1


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200))
def test_only_a_single_row_may_pass_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    for mine in plan(lengths, ranks, budget).ranks:
        for micro in mine:
            padded = len(micro) * max((lengths[row] for row in micro), default=0)
            assert padded <= budget or len(micro) == 1


@given(LENGTHS, st.integers(1, 5))
def test_ranks_differ_by_at_most_the_longest_row(lengths: list[int], ranks: int) -> None:
    made = plan(lengths, ranks, 100)
    loads = [sum(lengths[row] for micro in mine for row in micro) for mine in made.ranks]
    assert max(loads) - min(loads) <= max(lengths)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200))
def test_padding_waste_is_what_collate_would_compute(
    lengths: list[int], ranks: int, budget: int
) -> None:
    made = plan(lengths, ranks, budget)
    padded = sum(
        len(micro) * max(lengths[row] for row in micro) if micro else min(lengths)
        for mine in made.ranks
        for micro in mine
    )
    assert made.padded_tokens == padded
    assert made.padding_waste == pytest.approx(1.0 - sum(lengths) / padded)


def test_with_at_least_as_many_rows_as_ranks_no_rank_is_empty() -> None:
    made = plan([50, 1, 1], 3, 100)
    assert all(any(micro for micro in mine) for mine in made.ranks)


def _batch() -> LearnerBatch:
    return assemble(made_up_groups(seed=3))


def test_collate_keeps_every_value_at_its_place_and_pads_on_the_right() -> None:
    batch = _batch()
    micro = collate(batch, [4, 0, 7], learner_step=3)
    for at, row in enumerate([4, 0, 7]):
        flat = batch.rows[row].tokens
        length = len(flat.token_ids)
        assert micro.token_ids[at, :length].tolist() == flat.token_ids.tolist()
        assert micro.action_mask[at, :length].tolist() == flat.action_mask.tolist()
        assert micro.behaviour_logprobs[at, :length].tolist() == flat.behaviour_logprobs.tolist()
        assert micro.turn_ids[at, :length].tolist() == flat.turn_ids.tolist()
        assert not micro.action_mask[at, length:].any()
        assert int(micro.lengths_tokens[at]) == length
        first = int(flat.action_mask.argmax())
        prompt = [0 < place < first for place in range(micro.token_ids.shape[1])]
        assert micro.prompt_mask[at].tolist() == prompt
    assert micro.row_index.tolist() == [4, 0, 7]
    assert micro.temperature.tolist() == pytest.approx([0.7] * 3)
    assert not micro.filler


def test_a_sampled_token_equal_to_the_padding_id_keeps_its_place_in_the_loss() -> None:
    """Padding is told by length alone: an end token that equals the padding id is trained."""
    group = made_up_groups(seed=4, count=1)[0]
    turn = Turn(
        observation_ids=np.array([5], np.int32),
        action_ids=np.array([7, 0, 0], np.int32),
        behaviour_logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
        version_runs=(VersionRun(PolicyVersion(0, 0), 3),),
        finish="stop",
    )
    short = replace(group.trajectories[0], turns=(turn,))
    batch = assemble([replace(group, trajectories=(short, group.trajectories[1]))])
    micro = collate(batch, [1, 0], learner_step=1)
    assert micro.action_mask[1, :5].tolist() == [False, True, True, True, False]


def test_no_rows_make_a_filler_that_can_be_computed() -> None:
    batch = _batch()
    micro = collate(batch, [], learner_step=3)
    assert micro.filler
    assert micro.token_ids.shape == (1, min(batch.lengths_tokens))
    assert bool(micro.action_mask.any())


def test_lag_is_the_learners_step_minus_the_behaviour_step() -> None:
    row = _batch().rows[0]
    lags = lag_versions(row, 5)
    sampled = row.tokens.action_mask
    assert lags[sampled].tolist() == (5 - row.tokens.behaviour_steps[sampled]).tolist()
    assert not lags[~sampled].any()


def test_a_token_from_the_future_is_refused_never_lag_zero() -> None:
    with pytest.raises(InputError, match="after the learner's step 0"):
        lag_versions(_batch().rows[0], 0)


def test_lag_histograms_count_tokens_and_trajectories_by_their_oldest_token() -> None:
    batch = _batch()
    tokens, trajectories = batch.lag_histograms(3)
    expected: Counter[int] = Counter()
    for row in batch.rows:
        expected.update((3 - row.tokens.behaviour_steps[row.tokens.action_mask]).tolist())
    assert tokens == dict(sorted(expected.items()))
    assert sum(tokens.values()) == batch.action_tokens
    # Every trajectory begins with a turn of version 0 and goes on with one of version 1.
    assert trajectories == {3: len(batch.rows)}


def test_groups_are_numbered_by_position_in_the_batch_and_rewards_follow() -> None:
    groups = made_up_groups(seed=5, count=3)
    batch = assemble(groups)
    assert batch.group_index.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    wanted = [trajectory.reward for group in groups for trajectory in group.trajectories]
    assert batch.rewards.tolist() == wanted
    assert batch.rewards.dtype == torch.float64


def test_a_part_of_the_reward_is_averaged_over_the_trajectories_that_have_it() -> None:
    group = made_up_groups(seed=5, count=1)[0]
    one, two, *rest = group.trajectories
    parts = ({"format": 1.0, "answer": 0.5}, {"format": 0.0})
    changed = [replace(t, reward_parts=p) for t, p in zip((one, two), parts, strict=True)]
    batch = assemble([replace(group, trajectories=(*changed, *rest))])
    assert batch.reward_means()[1] == {"answer": 0.5, "format": 0.5}


def test_no_trajectories_are_refused() -> None:
    with pytest.raises(InputError, match="at least one"):
        assemble([])


def test_a_trajectory_that_starts_with_a_sampled_token_is_refused() -> None:
    group = made_up_groups(seed=6, count=1)[0]
    first = group.trajectories[0]
    bare = replace(first.turns[0], observation_ids=np.empty(0, np.int32))
    headless = replace(first, turns=(bare, first.turns[1]))
    with pytest.raises(InputError, match="start with an observed token"):
        assemble([replace(group, trajectories=(headless, *group.trajectories[1:]))])
