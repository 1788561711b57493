"""policy_objective against its slow truth: value and gradient, every composition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from correction.aggregation import Denominators
from correction.composition import Recipe
from tests.correction.micro_batches import (
    EVERY_RECIPE,
    MicroBatch,
    denominators_of,
    evaluate,
    make_batch,
    objective_of,
    recipe_label,
)
from tests.numerics.slow_truth import SlowBatch, is_known, loss_and_gradient

SLOW_RECIPES = [recipe for recipe in EVERY_RECIPE if is_known(recipe)]
every_recipe = pytest.mark.parametrize("recipe", SLOW_RECIPES, ids=recipe_label)


def slow(batch: MicroBatch, denominators: Denominators) -> SlowBatch:
    return SlowBatch(
        batch.target.tolist(),
        batch.proximal.tolist(),
        batch.behaviour.tolist(),
        batch.mask.tolist(),
        batch.lag.tolist(),
        batch.turns.tolist(),
        batch.advantages.tolist(),
        denominators.action_tokens,
        denominators.trajectories,
        denominators.max_tokens,
    )


@every_recipe
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    spread=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 8.0]),
)
def test_loss_and_gradient_equal_the_slow_truth(
    recipe: Recipe, seed: int, rows: int, columns: int, spread: float
) -> None:
    batch = make_batch(seed, rows, columns, spread)
    denominators = denominators_of(batch)

    objective, gradient = evaluate(recipe, batch, denominators)
    loss, slow_gradient = loss_and_gradient(recipe, slow(batch, denominators))

    scale = max(1.0, abs(loss))
    assert objective.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12 * scale)
    wanted = torch.tensor(slow_gradient, dtype=torch.float64)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12 * scale)


@every_recipe
@pytest.mark.parametrize("seed", range(5))
def test_float32_is_close_to_the_slow_truth(recipe: Recipe, seed: int) -> None:
    batch = make_batch(seed, spread=0.2)
    denominators = denominators_of(batch)
    narrow = batch.to(torch.float32)
    loss, slow_gradient = loss_and_gradient(recipe, slow(narrow, denominators))

    objective, gradient = evaluate(recipe, narrow, denominators)

    assert objective.loss.dtype == torch.float32
    assert objective.loss.item() == pytest.approx(loss, rel=1e-5, abs=1e-5)
    wanted = torch.tensor(slow_gradient, dtype=torch.float32)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "recipe",
    # A detached factor that moves with theta makes the gradient another one than the loss's.
    [
        recipe
        for recipe in SLOW_RECIPES
        if recipe.weight.kind != "target_behaviour"
        and recipe.surrogate.kind != "cispo"
        and recipe.proximal.value != "log_linear"
    ],
    ids=recipe_label,
)
def test_the_gradient_is_the_derivative_of_the_loss(recipe: Recipe) -> None:
    batch = make_batch(3, rows=2, columns=4, spread=0.05)
    target = batch.target.clone().requires_grad_()

    assert torch.autograd.gradcheck(
        lambda moved: objective_of(recipe, batch, target=moved).loss, (target,)
    )
