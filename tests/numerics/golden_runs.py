"""Recipes run as a learner would, on the few numbers of a vector: `prepare`, then one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from correction.batch_view import BatchView
from correction.composition import Recipe
from correction.objective import Objective, PolicyInputs, Prepared, policy_objective, prepare
from correction.recipes import resolve
from tests.numerics.golden_vectors import FixtureF, tensor

LIMIT_TOKENS = 4


def recipe_of(name: str, overrides: Mapping[str, object] | None = None) -> Recipe:
    """A recipe for on-policy runs of pairs."""
    return resolve(name, overrides or {}, max_lag_versions=0, group_size=2)


def prepared_from(
    recipe: Recipe,
    rewards: object,
    behaviour: Tensor,
    *,
    mask: Tensor | None = None,
    limit_tokens: int = LIMIT_TOKENS,
    **more: Any,  # noqa: ANN401
) -> Prepared:
    """`prepare` on one group, in the dtype of `behaviour` [N, T]; every place sampled, one turn."""
    given = {
        "rewards": tensor(rewards, behaviour.dtype),
        "group_index": torch.zeros(len(behaviour), dtype=torch.int64),
        "action_mask": torch.ones(behaviour.shape, dtype=torch.bool) if mask is None else mask,
        "turn_ids": torch.zeros(behaviour.shape, dtype=torch.int64),
        "behaviour_logprobs": behaviour,
        "truncated": torch.zeros(len(behaviour), dtype=torch.bool),
    }
    return prepare(recipe, BatchView(**(given | more)), limit_tokens=limit_tokens)


def prepared_with(advantages: Tensor, mask: Tensor, **more: Any) -> Prepared:  # noqa: ANN401
    """What `prepare` would give if it had come to these advantages [N]."""
    return Prepared(
        action_mask=mask,
        advantages=torch.where(mask, advantages[:, None], 0.0),
        token_rewards=torch.zeros(mask.shape, dtype=advantages.dtype),
        truncated=torch.zeros(len(mask), dtype=torch.bool),
        **more,
    )


def one_pass(
    recipe: Recipe,
    prepared: Prepared,
    target: Tensor,
    behaviour: Tensor,
    *,
    prompt_tokens: int = 0,
    **more: Any,  # noqa: ANN401
) -> tuple[Objective, Tensor]:
    """Objective of the whole batch and its gradient in the target logprobs [N, T]."""
    leaf = target.detach().clone().requires_grad_()
    places = torch.zeros(target.shape, dtype=torch.int64)
    given = {"lag_versions": places, "turn_ids": places}
    inputs = PolicyInputs(target_logprobs=leaf, behaviour_logprobs=behaviour, **(given | more))
    counts = prepared.denominators(LIMIT_TOKENS, prompt_tokens)
    objective = policy_objective(recipe, inputs, prepared, counts)
    (gradient,) = torch.autograd.grad(objective.loss, leaf, retain_graph=True)
    return objective, gradient


def on_fixture(
    name: str,
    overrides: Mapping[str, object] | None,
    dtype: torch.dtype,
    **more: Any,  # noqa: ANN401
) -> tuple[Objective, Tensor]:
    """A recipe on fixture F with the fixture's advantages. more: fields of `Prepared`."""
    f = FixtureF(dtype)
    return one_pass(
        recipe_of(name, overrides),
        prepared_with(f.advantages, f.mask, **more),
        f.target,
        f.behaviour,
        proximal_logprobs=f.proximal,
        lag_versions=f.lag,
        turn_ids=f.turns,
    )
