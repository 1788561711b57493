"""Every recipe by name, from `prepare` to the gradient, against its paper's formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from correction.errors import RecipeError
from correction.objective import policy_objective, prepare
from correction.parts import SEVERAL, kind_of, parameters_of
from correction.recipes import RECIPES, Recipe, resolve
from tests.numerics.slow_batch import (
    COLUMNS,
    LEAVES,
    LIMIT_TOKENS,
    PlainBatch,
    TorchBatch,
    make_batch,
    narrowed,
)
from tests.numerics.slow_reuse import REUSE_FORMULAS
from tests.numerics.slow_signal import SIGNAL_FORMULAS
from tests.numerics.slow_terms import Slow, depends_on, gradient

FORMULAS = {**REUSE_FORMULAS, **SIGNAL_FORMULAS}
SEEDS = range(6)
MICRO_BATCHES = (torch.tensor([6, 0, 3]), torch.tensor([1, 2, 4, 5, 7]))
UNSEEN = {
    "advantage.std_epsilon",
    "surrogate.probability_floor",
    "penalties.pretraining.coefficient",
}
"""Numbers that guard against a division by 0, and the learner's own."""
every_recipe = pytest.mark.parametrize("name", RECIPES)


def loss_and_gradients(
    recipe: Recipe, batch: PlainBatch, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a learner would do: prepare the whole batch, then backward in two micro-batches."""
    whole = TorchBatch(recipe, batch, dtype)
    prepared = prepare(whole.recipe, whole.view(), limit_tokens=LIMIT_TOKENS)
    prompt_tokens = sum(map(sum, batch.prompt_mask))
    counts = prepared.denominators(LIMIT_TOKENS, prompt_tokens)
    leaves = whole.leaves()
    total = torch.zeros((), dtype=dtype)
    for rows in MICRO_BATCHES:
        part = policy_objective(
            whole.recipe, whole.inputs(leaves, rows), prepared.rows(rows, COLUMNS), counts
        )
        part.loss.backward()  # type: ignore[no-untyped-call]
        total += part.loss.detach()
    # A leaf that the recipe does not need has no gradient at all.
    return total, {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}


def told(leaf: str) -> Callable[[str], str]:
    return lambda text: f"gradient in {leaf}: {text}"


def batch_for(name: str, seed: int) -> PlainBatch:
    return make_batch(seed, binary=name == "maxrl")


def test_every_recipe_has_a_formula() -> None:
    assert FORMULAS.keys() == RECIPES.keys()


@every_recipe
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_and_gradients_are_those_of_the_formula(name: str, seed: int) -> None:
    batch = batch_for(name, seed)

    loss, gradients = loss_and_gradients(RECIPES[name], batch, torch.float64)

    assert loss.item() == pytest.approx(FORMULAS[name](Slow(batch)).real, rel=1e-9, abs=1e-11)
    for leaf in LEAVES:
        if leaf not in gradients:
            assert not depends_on(FORMULAS[name], batch, leaf), leaf
            continue
        wanted = torch.tensor(gradient(FORMULAS[name], batch, leaf), dtype=torch.float64)
        torch.testing.assert_close(
            gradients[leaf].flatten(), wanted, rtol=1e-9, atol=1e-11, msg=told(leaf)
        )


@every_recipe
def test_float32_is_close_to_the_formula(name: str) -> None:
    batch = narrowed(batch_for(name, 5))

    loss, gradients = loss_and_gradients(RECIPES[name], batch, torch.float32)

    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(FORMULAS[name](Slow(batch)).real, rel=1e-5, abs=1e-5)
    for leaf, found in gradients.items():
        wanted = torch.tensor(gradient(FORMULAS[name], batch, leaf), dtype=torch.float32)
        torch.testing.assert_close(found.flatten(), wanted, rtol=1e-5, atol=1e-5, msg=told(leaf))


def parameters(recipe: Recipe) -> Iterator[tuple[str, float]]:
    """Every number of a recipe that the loss depends on, by the key that overrides it."""
    for slot, part in recipe.standing:
        key = f"{slot}.{kind_of(part)}" if slot in SEVERAL else slot
        for name, value in parameters_of(part).items():
            if type(value) is float and value != 0 and slot != "control":
                yield f"{key}.{name}", value


def shifted(name: str, key: str, value: float) -> Recipe:
    """The recipe with one number a little off; at twice the number if that only says yes or no."""
    yes_or_no = key.startswith(("trust", "shaping")) or (name, key[:6]) == ("icepop", "weight")
    factor, other = (2.0, 0.5) if yes_or_no else (0.97, 1.03)
    # Opob's bound and that of the weight are one number in two places.
    keys = ("weight.high", "advantage.max_weight") if name == "vcpo" else (key,)
    try:
        return resolve(name, dict.fromkeys(keys, factor * value), max_lag_versions=0, group_size=2)
    except RecipeError:
        return resolve(name, dict.fromkeys(keys, other * value), max_lag_versions=0, group_size=2)


def losses(recipe: Recipe) -> list[float]:
    batches = [batch_for(recipe.name, seed) for seed in SEEDS]
    return [loss_and_gradients(recipe, batch, torch.float64)[0].item() for batch in batches]


@every_recipe
def test_the_batches_tell_every_default_from_its_neighbour(name: str) -> None:
    """Something lies beyond each bound, clip and limit: a wrong number would have been seen."""
    usual = losses(RECIPES[name])
    for key, value in parameters(RECIPES[name]):
        if key not in UNSEEN:
            assert losses(shifted(name, key, value)) != pytest.approx(usual, abs=1e-9), key
