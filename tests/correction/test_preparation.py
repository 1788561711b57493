"""What is decided once for a batch: order, shapes, what the loss may see, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.batch_view import BatchView
from correction.errors import InputError
from correction.objective import Prepared, prepare
from correction.recipes import RECIPES, Recipe, resolve

MASK = torch.tensor(
    [[True, True, False, True], [True, False, True, False], [True, True, True, True],
     [False, True, True, False]]
)  # fmt: skip
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 9, 9])


def logprobs(seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return -torch.rand(4, 4, generator=random, dtype=torch.float64) - 0.1


def view_of(**changes: Any) -> BatchView:  # noqa: ANN401
    given = {
        "rewards": REWARDS,
        "group_index": GROUPS,
        "action_mask": MASK,
        "turn_ids": torch.zeros(4, 4, dtype=torch.int64),
        "behaviour_logprobs": logprobs(0),
        "truncated": torch.tensor([False, True, False, False]),
        "scores": logprobs(1),
        "reference_logprobs": logprobs(2),
        "values": logprobs(3),
        "final_values": torch.tensor([5.0, 6.0, 7.0, 8.0], dtype=torch.float64),
        "teacher_logprobs": logprobs(4),
        "teacher_versions": torch.full((4, 4), 3),
        "behaviour_versions": torch.full((4, 4), 3),
        "segment_ids": torch.full((4, 4), -1),
        "prompt_nll": torch.tensor([10.0, 10.0, 40.0, 40.0], dtype=torch.float64),
    }
    return BatchView(**(given | changes))


def recipe_of(name: str, **overrides: object) -> Recipe:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve(name, dotted, max_lag_versions=0, group_size=2)


def prepared_of(recipe: Recipe, **changes: Any) -> Prepared:  # noqa: ANN401
    return prepare(recipe, view_of(**changes), limit_tokens=5)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_every_recipe_prepares_a_batch_and_its_rows_are_those_of_the_whole(recipe: Recipe) -> None:
    whole = prepared_of(recipe)
    assert whole.advantages.shape == MASK.shape
    assert bool((whole.advantages[~MASK] == 0).all())
    whole.check()
    index = torch.tensor([2, 0])
    part = whole.rows(index, 3)
    assert torch.equal(part.advantages, whole.advantages[index][:, :3])
    assert torch.equal(part.action_mask, MASK[index][:, :3])
    assert torch.equal(part.truncated, whole.truncated[index])
    for rule, mask in whole.keep.items():
        assert torch.equal(part.keep[rule], mask[index][:, :3])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_masked_places_change_no_bit(recipe: Recipe) -> None:
    clean = prepared_of(recipe)
    view = view_of()
    dirty = {
        name: torch.where(MASK, getattr(view, name), math.nan)
        for name in ("behaviour_logprobs", "scores", "reference_logprobs", "values",
                     "teacher_logprobs")
    }  # fmt: skip
    other = prepare(recipe, replace(view, **dirty), limit_tokens=5)
    assert torch.equal(clean.advantages, other.advantages)
    assert torch.equal(clean.token_rewards, other.token_rewards)
    assert clean.keep.keys() == other.keep.keys()
    assert all(torch.equal(clean.keep[rule], other.keep[rule]) for rule in clean.keep)


def test_grpo_gives_every_token_its_trajectorys_advantage() -> None:
    advantages = prepared_of(recipe_of("ppo_bypass", advantage__std_epsilon=0.0)).advantages
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(advantages, signs[:, None] * MASK)


def test_kl_in_the_reward_is_taken_of_mu_and_moves_the_advantages_of_trajectories() -> None:
    recipe = recipe_of("ppo_bypass", advantage="return", penalties__kl__place="reward",
                       penalties__kl__coefficient=0.1)  # fmt: skip
    prepared = prepared_of(recipe)
    k1 = torch.where(MASK, logprobs(0) - logprobs(2), 0.0)
    torch.testing.assert_close(prepared.token_rewards.sum(-1), REWARDS - 0.1 * k1.sum(-1))
    wanted = (REWARDS - 0.1 * k1.sum(-1))[:, None] * MASK
    torch.testing.assert_close(prepared.advantages, wanted)


def test_kl_in_the_reward_of_a_recomputed_proximal_policy_is_that_policys() -> None:
    recipe = recipe_of("decoupled_ppo", advantage="return", penalties__kl__place="reward",
                       penalties__kl__coefficient=0.1)  # fmt: skip
    k1 = torch.where(MASK, logprobs(1) - logprobs(2), 0.0)
    torch.testing.assert_close(
        prepared_of(recipe).token_rewards.sum(-1), REWARDS - 0.1 * k1.sum(-1)
    )


def test_a_coefficient_in_force_replaces_the_recipes() -> None:
    recipe = recipe_of("grpo")
    assert prepare(recipe, view_of(), limit_tokens=5).kl_coefficient == 0.04
    assert prepare(recipe, view_of(), limit_tokens=5, kl_coefficient=0.3).kl_coefficient == 0.3


def test_overlong_penalty_comes_before_the_group_baseline() -> None:
    recipe = recipe_of("ppo_bypass", advantage="return",
                       shaping__overlong_penalty__cache_share=0.4)  # fmt: skip
    # Limit 5, cache 2: three tokens are free, four cost a half; a cut answer costs all.
    shaped = prepared_of(recipe).advantages[torch.arange(4), [0, 0, 0, 1]]
    assert shaped.tolist() == [1.0, -1.0, -0.5, 1.0]


def test_the_overlong_filter_takes_truncated_rows_out_of_loss_and_counts() -> None:
    prepared = prepared_of(recipe_of("ppo_bypass", shaping="overlong_filter"))
    assert not prepared.action_mask[1].any()
    counts = prepared.denominators(limit_tokens=5)
    assert (counts.action_tokens, counts.trajectories) == (9, 3)
    assert prepared.metrics["overlong_filtered_fraction"] == pytest.approx(2 / 11)
    # The baseline has seen it: its sibling's advantage is that of a group of two.
    assert prepared.advantages[0, 0] > 0.9


def test_a_batch_that_is_filtered_away_keeps_denominators_that_can_be_divided_by() -> None:
    recipe = recipe_of("ppo_bypass", shaping="overlong_filter")
    prepared = prepared_of(recipe, truncated=torch.ones(4, dtype=torch.bool))
    counts = prepared.denominators(limit_tokens=5)
    assert (counts.action_tokens, counts.trajectories) == (1, 1)
    assert prepared.metrics["overlong_filtered_fraction"] == 1.0


def test_prompt_weights_are_of_prompts_and_multiply_advantages() -> None:
    plain = prepared_of(recipe_of("erpo", penalties__prompt_kl__weights="none")).advantages
    weighed = prepared_of(recipe_of("erpo")).advantages
    torch.testing.assert_close(weighed[:2], plain[:2] * 2.0)  # mean 25 over 10 is 2.5: clipped
    torch.testing.assert_close(weighed[2:], plain[2:] * 0.625)


def test_m2_is_decided_over_the_whole_batch() -> None:
    recipe = recipe_of("m2po", trust__m2__limit=0.01)
    keep = prepared_of(recipe).keep["m2"]
    squares = (logprobs(1) - logprobs(0)).square()
    kept = squares[keep & MASK]
    assert float(kept.mean()) < 0.01
    assert float(squares[~keep].min()) > float(kept.max())


def test_gae_bootstraps_where_an_episode_was_cut_and_not_where_it_ended() -> None:
    recipe = recipe_of("ppo", advantage__gae_lambda=1.0)
    targets = prepared_of(recipe).value_targets
    assert targets is not None
    # lambda 1: the target is the return; row 1 was cut and goes on at its final value 6.
    torch.testing.assert_close(targets[0, 0], torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(targets[1, 0], torch.tensor(6.0, dtype=torch.float64))
    plain = recipe_of("ppo", advantage__gae_lambda=1.0, advantage__bootstrap_truncated=False)
    ended = prepared_of(plain).value_targets
    assert ended is not None
    assert float(ended[1, 0]) == pytest.approx(0.0)


def test_a_prompt_of_one_token_weighs_as_the_mean_one() -> None:
    nll = torch.tensor([0.0, 0.0, 40.0, 40.0], dtype=torch.float64)
    plain = prepared_of(recipe_of("erpo", penalties__prompt_kl__weights="none")).advantages
    assert torch.equal(prepared_of(recipe_of("erpo"), prompt_nll=nll).advantages, plain)
    assert torch.equal(prepared_of(recipe_of("erpo"), prompt_nll=nll * 0).advantages, plain)


def test_masks_of_the_whole_batch_are_there_when_all_of_it_is_filtered() -> None:
    recipe = recipe_of("m2po", shaping="overlong_filter")
    keep = prepared_of(recipe, truncated=torch.ones(4, dtype=torch.bool)).keep
    assert bool(keep["m2"].all())


def test_rewards_of_filtered_rows_are_not_seen() -> None:
    recipe = recipe_of("vtrace", shaping="overlong_filter")
    prepared = prepared_of(recipe, rewards=REWARDS + 1.0)
    assert not prepared.token_rewards[1].any()
    prepared.check()


def test_vtrace_without_a_critic_takes_the_mean_of_the_siblings() -> None:
    baseline = prepared_of(recipe_of("vtrace")).baseline
    assert baseline is not None
    assert baseline.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_metrics_of_the_batch() -> None:
    metrics = prepared_of(recipe_of("ppo_bypass"), rewards=REWARDS * 0 + 0.3).metrics
    assert metrics["zero_variance_group_fraction"] == 1.0
    assert metrics["advantage_mean"] == metrics["advantage_std"] == 0.0


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("ppo", "values", "values: missing, a recipe that needs values needs it"),
        ("ppo", "final_values", "final_values: missing"),
        ("vcpo", "scores", "scores: missing"),
        ("m2po", "scores", "scores: missing"),
        ("instructgpt", "reference_logprobs", "reference_logprobs: missing"),
        ("srpo", "teacher_logprobs", "teacher_logprobs: missing"),
        ("srpo", "teacher_versions", "teacher_versions: missing"),
        ("arpo", "segment_ids", "segment_ids: missing"),
        ("erpo", "prompt_nll", "prompt_nll: missing"),
    ],
)
def test_what_a_recipe_needs_and_is_missing_is_named(name: str, missing: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepared_of(recipe_of(name), **{missing: None})


def test_a_teacher_of_another_version_is_refused() -> None:
    versions = torch.full((4, 4), 3)
    versions[0, 1] = 2
    with pytest.raises(InputError, match=r"1 tokens were scored by another version.*\[0, 1\]"):
        prepared_of(recipe_of("srpo"), teacher_versions=versions)
    versions[0, 1], versions[0, 2] = 3, 9  # a masked place says nothing
    prepared_of(recipe_of("srpo"), teacher_versions=versions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": REWARDS[:3]}, r"rewards: expected shape \[4\]"),
        ({"rewards": REWARDS * math.nan}, "rewards: 4 non-finite"),
        ({"rewards": REWARDS.long()}, "rewards: expected a floating-point dtype"),
        ({"group_index": GROUPS.int()}, "group_index: expected dtype torch.int64"),
        ({"truncated": GROUPS}, "truncated: expected dtype torch.bool"),
        ({"action_mask": MASK & False}, "action_mask: no place is true"),
        ({"scores": logprobs(1)[:2]}, r"scores: expected shape \[4, 4\]"),
        ({"values": logprobs(1) * math.inf}, "values: 11 non-finite"),
        ({"final_values": torch.zeros(3)}, r"final_values: expected shape \[4\]"),
        ({"turn_ids": torch.full((4, 4), 4)}, r"turn_ids: must be in \[0, 4\)"),
    ],
)
def test_a_broken_view_is_refused_by_name(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        view_of(**change)


def test_a_group_of_one_is_refused_where_a_group_is_needed() -> None:
    with pytest.raises(InputError, match="group 8 has one member"):
        prepared_of(recipe_of("ppo_bypass"), group_index=torch.tensor([7, 7, 8, 7]))
