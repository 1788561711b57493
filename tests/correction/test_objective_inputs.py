"""What the objective refuses, by the argument's name, and what it accepts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from correction.aggregation import Denominators
from correction.composition import Recipe
from correction.errors import InputError
from correction.objective import PolicyInputs, policy_objective
from correction.recipes import resolve
from tests.correction.micro_batches import (
    MicroBatch,
    inputs_of,
    make_batch,
    objective_of,
    prepared_of,
)

RECIPE = resolve("decoupled_ppo", {}, max_lag_versions=4, group_size=2)
BYPASS = resolve("ppo_bypass", {}, max_lag_versions=4, group_size=2)
FIELD_OF = {
    "target_logprobs": "target",
    "proximal_logprobs": "proximal",
    "behaviour_logprobs": "behaviour",
    "lag_versions": "lag",
    "turn_ids": "turns",
}


def broken(name: str, value: torch.Tensor) -> MicroBatch:
    return replace(make_batch(0), **{FIELD_OF[name]: value})


def with_first(name: str, value: float) -> MicroBatch:
    """The first place, an action token, set to a value."""
    tensor = getattr(make_batch(0), FIELD_OF[name]).clone()
    tensor[(0,) * tensor.dim()] = value
    return broken(name, tensor)


@pytest.mark.parametrize("name", ["target_logprobs", "proximal_logprobs", "behaviour_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logprobs_of_action_tokens(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"{name}: 1 non-finite values, the first at \[0, 0\]"):
        objective_of(RECIPE, with_first(name, value))


@pytest.mark.parametrize("name", ["advantages", "token_rewards"])
def test_what_was_prepared_is_checked_as_well(name: str) -> None:
    batch = make_batch(0)
    good = prepared_of(RECIPE, batch)
    values: torch.Tensor = getattr(good, name)
    broken_values = values.clone()
    broken_values[0, 0] = math.nan
    for wrong, message in (
        (broken_values, f"{name}: 1 non-finite"),
        (values[:-1], f"{name}: expected shape"),
        (values.long(), f"{name}: expected a floating-point dtype"),
    ):
        changes: dict[str, Any] = {name: wrong}
        prepared = replace(good, **changes)
        with pytest.raises(InputError, match=message):
            policy_objective(RECIPE, inputs_of(RECIPE, batch), prepared, Denominators(24, 4, 8))


@pytest.mark.parametrize("name", FIELD_OF)
def test_shapes(name: str) -> None:
    wrong = getattr(make_batch(0), FIELD_OF[name])[:-1]
    with pytest.raises(InputError, match=r"expected shape \[(3|4)(, 6)?\], got"):
        objective_of(RECIPE, broken(name, wrong))


@pytest.mark.parametrize("name", ["target_logprobs", "proximal_logprobs", "behaviour_logprobs"])
def test_floating_dtypes(name: str) -> None:
    wrong = getattr(make_batch(0), FIELD_OF[name]).long()
    with pytest.raises(InputError, match=f"{name}: expected a floating-point dtype"):
        objective_of(RECIPE, broken(name, wrong))


@pytest.mark.parametrize("name", ["lag_versions", "turn_ids"])
def test_integer_dtypes(name: str) -> None:
    wrong = getattr(make_batch(0), FIELD_OF[name]).int()
    with pytest.raises(InputError, match=f"{name}: expected dtype torch.int64"):
        objective_of(RECIPE, broken(name, wrong))


def test_a_mask_is_bool_two_dimensional_and_has_a_true() -> None:
    batch = make_batch(0)
    good, inputs = prepared_of(RECIPE, batch), inputs_of(RECIPE, batch)
    for wrong, message in (
        (batch.mask.long(), "action_mask: expected dtype torch.bool"),
        (batch.mask[0], r"action_mask: expected shape \[B, T\]"),
        (torch.zeros_like(batch.mask), "action_mask: no place is true"),
        (batch.mask[:-1], r"advantages: expected shape \[3, 6\]"),
    ):
        prepared = replace(good, action_mask=wrong)
        with pytest.raises(InputError, match=message):
            policy_objective(RECIPE, inputs, prepared, Denominators(100, 100, 100))


def test_a_token_from_the_future_is_never_lag_zero() -> None:
    with pytest.raises(InputError, match="lag_versions: must be >= 0 where the mask is true, got"):
        objective_of(RECIPE, with_first("lag_versions", -1))


@pytest.mark.parametrize("turn", [-1, 6])
def test_turn_ids_count_within_the_row(turn: int) -> None:
    with pytest.raises(InputError, match=r"turn_ids: must be in \[0, 6\)"):
        objective_of(RECIPE, with_first("turn_ids", turn))


@pytest.mark.parametrize(("tokens", "trajectories"), [(1, 4), (24, 1)])
def test_local_denominators_are_refused(tokens: int, trajectories: int) -> None:
    with pytest.raises(InputError, match="pass the counts of the global batch"):
        objective_of(RECIPE, make_batch(0), Denominators(tokens, trajectories, 8))


@pytest.mark.parametrize("name", ["action_tokens", "trajectories", "max_tokens"])
def test_denominators_are_positive(name: str) -> None:
    with pytest.raises(InputError, match=f"denominators.{name}: must be >= 1, got 0"):
        Denominators(**{"action_tokens": 1, "trajectories": 1, "max_tokens": 1} | {name: 0})


def without_scores(recipe: Recipe) -> torch.Tensor:
    batch = make_batch(0)
    inputs = PolicyInputs(
        target_logprobs=batch.target,
        behaviour_logprobs=batch.behaviour,
        lag_versions=batch.lag,
        turn_ids=batch.turns,
    )
    prepared = prepared_of(recipe, batch)
    return policy_objective(recipe, inputs, prepared, Denominators(24, 4, 8)).loss


def test_missing_proximal_scores_are_refused_where_they_are_needed() -> None:
    with pytest.raises(InputError, match="proximal_logprobs: this recipe needs"):
        without_scores(RECIPE)


def test_bypass_does_not_look_at_proximal_scores() -> None:
    given = objective_of(BYPASS, make_batch(0), Denominators(24, 4, 8)).loss
    assert torch.equal(without_scores(BYPASS), given)


def test_reinforce_without_scores_measures_the_target_against_the_behaviour() -> None:
    plain = resolve("none", {}, max_lag_versions=0, group_size=2)
    given = objective_of(plain, make_batch(0), Denominators(24, 4, 8)).loss
    assert torch.equal(without_scores(plain), given)
