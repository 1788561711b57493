"""What must never change the loss, its gradient and its sums; and what must."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from correction.aggregation import Aggregation
from correction.composition import Recipe
from correction.objective import add_sums, summarise
from correction.recipes import resolve
from tests.correction.micro_batches import (
    EVERY_RECIPE,
    denominators_of,
    evaluate,
    make_batch,
    objective_of,
    recipe_label,
)

every_recipe = pytest.mark.parametrize("recipe", EVERY_RECIPE, ids=recipe_label)
seeds = st.integers(0, 2**31)
quick = settings(max_examples=8, deadline=None)


def has_identity(recipe: Recipe) -> bool:
    """Whether ratios of 1 leave nothing but the plain policy gradient of the given advantages."""
    traced = recipe.advantage.kind == "vtrace"
    other = traced or recipe.surrogate.kind in ("gepo", "cross_entropy")
    return not (other or recipe.penalties or recipe.critic.kind != "none")


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def assert_same_sums(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=1e-12, atol=1e-12, msg=key)


@every_recipe
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masked_places_change_no_bit(recipe: Recipe, garbage: float, dtype: torch.dtype) -> None:
    batch = make_batch(11).to(dtype)
    assert not batch.mask.all()

    objective, gradient = evaluate(recipe, batch)
    dirty, dirty_gradient = evaluate(recipe, batch.with_garbage(garbage))

    assert torch.equal(objective.loss, dirty.loss)
    assert torch.equal(gradient, dirty_gradient)
    assert bool((dirty_gradient[~batch.mask] == 0).all())
    assert all(torch.equal(objective.sums[key], dirty.sums[key]) for key in objective.sums)


@every_recipe
def test_a_padding_row_changes_no_bit_whatever_its_advantage(recipe: Recipe) -> None:
    batch = make_batch(5, rows=3)
    mask = batch.mask & (torch.arange(3) != 2)[:, None]
    batch = replace(batch, mask=mask, token_rewards=batch.token_rewards * mask)

    objective, gradient = evaluate(recipe, batch)
    broken = torch.where(torch.arange(3) == 2, math.nan, batch.advantages)
    dirty, dirty_gradient = evaluate(recipe, replace(batch, advantages=broken))

    assert torch.equal(objective.loss, dirty.loss)
    assert torch.equal(gradient, dirty_gradient)


@every_recipe
@quick
@given(seed=seeds, columns=st.integers(1, 4))
def test_padding_changes_nothing(recipe: Recipe, seed: int, columns: int) -> None:
    batch = make_batch(seed)
    objective, gradient = evaluate(recipe, batch)

    padded, padded_gradient = evaluate(recipe, batch.padded(columns).with_garbage(math.nan))

    assert_same(objective.loss, padded.loss)
    assert_same(gradient, padded_gradient[:, columns:-columns] * batch.mask)
    assert_same_sums(objective.sums, padded.sums)


@every_recipe
@quick
@given(seed=seeds, order=st.permutations(range(4)))
def test_the_order_of_trajectories_changes_nothing(
    recipe: Recipe, seed: int, order: list[int]
) -> None:
    batch = make_batch(seed)
    objective, gradient = evaluate(recipe, batch)

    shuffled, shuffled_gradient = evaluate(recipe, batch.rows(order))

    assert_same(objective.loss, shuffled.loss)
    assert_same(gradient[order], shuffled_gradient)
    assert_same_sums(objective.sums, shuffled.sums)


@every_recipe
@quick
@given(seed=seeds, cut=st.integers(1, 5))
def test_micro_batches_add_up_to_the_batch(recipe: Recipe, seed: int, cut: int) -> None:
    batch = make_batch(seed, rows=6, density=0.95)
    whole = denominators_of(batch)
    objective, gradient = evaluate(recipe, batch, whole)

    first, first_gradient = evaluate(recipe, batch.rows(list(range(cut))), whole)
    last, last_gradient = evaluate(recipe, batch.rows(list(range(cut, 6))), whole)

    assert_same(objective.loss, first.loss + last.loss)
    assert_same(gradient, torch.cat([first_gradient, last_gradient]))
    assert_same_sums(objective.sums, add_sums(first.sums, last.sums))


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in EVERY_RECIPE if has_identity(recipe)], ids=recipe_label
)
@quick
@given(seed=seeds)
def test_ratios_of_one_make_every_correction_the_identity(recipe: Recipe, seed: int) -> None:
    batch = make_batch(seed, spread=0.0)
    # Lag alone is no reason to reject by ratio; max_lag is tested by itself.
    batch = replace(batch, lag=torch.zeros_like(batch.lag), keep=torch.ones_like(batch.keep))
    objective, gradient = evaluate(recipe, batch)
    plain = replace(
        resolve("none", {}, max_lag_versions=0, group_size=2), aggregation=recipe.aggregation
    )
    _, plain_gradient = evaluate(plain, batch)

    assert_same(gradient, plain_gradient)
    metrics = summarise({key: value.item() for key, value in objective.sums.items()})
    assert metrics["weight_changed_fraction"] == metrics["rejected_fraction"] == 0.0
    for name in ("token_raw", "token_bounded", "trajectory_raw", "trajectory_bounded"):
        assert metrics[f"ess_ratio_{name}"] == pytest.approx(1.0, abs=1e-12)


@quick
@given(seed=seeds)
def test_decoupled_is_plain_ppo_where_the_proximal_policy_is_the_behaviour(seed: int) -> None:
    batch = make_batch(seed)
    batch = replace(batch, proximal=batch.behaviour)
    decoupled = resolve("decoupled_ppo", {}, max_lag_versions=4, group_size=2)
    bypass = resolve("ppo_bypass", {}, max_lag_versions=4, group_size=2)

    left, left_gradient = evaluate(decoupled, batch)
    right, right_gradient = evaluate(bypass, batch)

    assert_same(left.loss, right.loss)
    assert_same(left_gradient, right_gradient)


@quick
@given(seed=seeds)
def test_gspo_is_ppo_on_answers_of_one_token(seed: int) -> None:
    batch = make_batch(seed, columns=1)
    clip = {"surrogate.clip_low": 0.1, "surrogate.clip_high": 0.1}
    gspo = resolve("decoupled_gspo", clip, max_lag_versions=4, group_size=2)
    ppo = resolve("tis", clip | {"surrogate.dual_clip": 0}, max_lag_versions=4, group_size=2)

    left, left_gradient = evaluate(gspo, batch)
    right, right_gradient = evaluate(ppo, batch)

    assert_same(left.loss, right.loss)
    assert_same(left_gradient, right_gradient)


@pytest.mark.parametrize("level", ["token", "turn_geometric", "sequence_product", "geometric"])
@pytest.mark.parametrize("aggregation", [kind.value for kind in Aggregation])
@quick
@given(seed=seeds)
def test_rejection_never_enlarges_a_step(level: str, aggregation: str, seed: int) -> None:
    parts = {"weight.level": level, "aggregation": aggregation}
    free = resolve("decoupled_ppo", parts | {"weight.bound": "none"}, max_lag_versions=4,
                   group_size=2)  # fmt: skip
    band = {"weight.bound": "band", "weight.low": 0.8, "weight.high": 1.25}
    banded = resolve("decoupled_ppo", parts | band, max_lag_versions=4, group_size=2)
    batch = make_batch(seed)

    _, before = evaluate(free, batch)
    _, after = evaluate(banded, batch)

    kept = after != 0
    assert torch.equal(after[kept], before[kept])
    assert bool((after.abs() <= before.abs()).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("distance", [3.0, 1e4])
def test_an_all_rejected_batch_gives_zero_and_says_so(dtype: torch.dtype, distance: float) -> None:
    band = {"weight": {"bound": "band", "low": 0.8, "high": 1.25}}
    recipe = resolve("decoupled_ppo", band, max_lag_versions=4, group_size=2)
    batch = make_batch(2).to(dtype)
    batch = replace(batch, behaviour=batch.proximal - distance)

    objective, gradient = evaluate(recipe, batch)
    metrics = summarise({key: value.item() for key, value in objective.sums.items()})

    assert objective.loss.item() == 0.0
    assert bool((gradient == 0).all())
    assert metrics["rejected_fraction"] == 1.0
    assert metrics["ess_ratio_token_bounded"] == metrics["ess_ratio_trajectory_bounded"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


@every_recipe
@quick
@given(seed=seeds, spread=st.sampled_from([1.0, 30.0, 1e3, 1e30]))
def test_nothing_is_ever_nan(recipe: Recipe, seed: int, spread: float) -> None:
    batch = make_batch(seed, spread=spread).to(torch.float32)

    objective, gradient = evaluate(recipe, batch)
    metrics = summarise({key: value.item() for key, value in objective.sums.items()})

    assert bool(torch.isfinite(objective.loss))
    assert bool(torch.isfinite(gradient).all())
    assert all(math.isfinite(value) for value in metrics.values())


@every_recipe
def test_sixteen_bit_logprobs_are_widened_before_they_are_subtracted(recipe: Recipe) -> None:
    batch = make_batch(4)
    narrow = batch.to(torch.bfloat16)

    objective = objective_of(recipe, narrow)

    assert objective.loss.dtype == torch.float32
    wide = objective_of(recipe, narrow.to(torch.float32))
    torch.testing.assert_close(objective.loss, wide.loss, rtol=1e-6, atol=1e-6)


@every_recipe
def test_no_gradient_flows_into_the_proximal_policy_or_the_behaviour(recipe: Recipe) -> None:
    batch = make_batch(6)
    target, proximal, behaviour = (
        logprobs.clone().requires_grad_()
        for logprobs in (batch.target, batch.proximal, batch.behaviour)
    )
    attached = replace(batch, proximal=proximal, behaviour=behaviour)

    loss = objective_of(recipe, attached, target=target).loss
    gradients = torch.autograd.grad(loss, (target, proximal, behaviour), allow_unused=True)

    assert gradients[0] is not None
    assert gradients[1] is None
    assert gradients[2] is None
