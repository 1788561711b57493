"""The two calls of a learner: advantages of a batch, and the policy loss of a micro-batch.

    advantages = group_advantages(recipe, rewards, group_index)          whole batch, once
    objective = policy_objective(recipe, ..., denominators=...)          each micro-batch
    objective.loss.backward()                                            gradients add up
    metrics = summarise(sums of all parts)                               `pooling`

Order inside: proximal -> weight, bounded and detached -> surrogate -> aggregation by the original
counts -> diagnostics. Nothing here reduces across ranks: global counts come in as numbers, sums
go out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from correction.aggregation import Denominators, aggregate, check_denominators
from correction.checks import (
    require_finite,
    require_floating,
    require_integers,
    require_mask,
    require_range,
    require_shape,
)
from correction.diagnostics import StepView, additive_sums
from correction.masks import fill_masked
from correction.pooling import add_sums, summarise
from correction.proximal import Proximal, proximal_anchor
from correction.ratios import log_ratio
from correction.recipes import Recipe
from correction.surrogate_parts import SurrogateInputs
from correction.weight_parts import TargetBehaviourWeight

__all__ = [
    "Denominators",
    "Objective",
    "add_sums",
    "group_advantages",
    "policy_objective",
    "summarise",
]


@dataclass(frozen=True, slots=True)
class Objective:
    """One micro-batch's share of the step.

    loss: scalar with gradient, divided by the global denominators already: the shares of all
        micro-batches and ranks add up to the loss of the batch.
    sums: detached float64 scalars for `add_sums` and `summarise`.
    """

    loss: Tensor
    sums: dict[str, Tensor]


def group_advantages(recipe: Recipe, rewards: Tensor, group_index: Tensor) -> Tensor:
    """Advantages [N] of the trajectories of a whole batch, detached, dtype of rewards.

    rewards: [N] floating. group_index: [N] int64, any number that is the same for siblings.
    Raises InputError for shapes, dtypes, non-finite rewards and a group of one.
    """
    return recipe.advantage(rewards, group_index)


def policy_objective(
    recipe: Recipe,
    *,
    target_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    lag_versions: Tensor,
    turn_ids: Tensor,
    denominators: Denominators,
) -> Objective:
    """Policy loss and additive sums of one micro-batch of whole trajectories.

    target_logprobs: [B, T] floating, log theta of the sampled tokens, with gradient.
    proximal_logprobs: [B, T], log prox; None where `recipe.needs_proximal_pass` is false.
    behaviour_logprobs: [B, T], log mu as the engine returned it.
    advantages: [B], from `group_advantages`.
    action_mask: [B, T] bool, true on sampled tokens. A row without any is padding.
    lag_versions: [B, T] int64, learner version minus behaviour version, >= 0.
    turn_ids: [B, T] int64, in [0, T), the turn of each sampled token.
    denominators: counts of the global batch.

    What stands at masked places never matters, NaN included. 16-bit logprobs are widened to
    float32; float64 stays. Raises InputError for shapes, dtypes, a mask without any true,
    non-finite logprobs or advantages, negative lag, and denominators smaller than the batch.
    """
    _check_ids(action_mask, lag_versions, turn_ids)
    _check_numbers(action_mask, advantages, target_logprobs, proximal_logprobs, behaviour_logprobs)
    check_denominators(action_mask, denominators)

    log_ratios = _target_to_proximal(
        recipe, target_logprobs, proximal_logprobs, behaviour_logprobs, action_mask
    )
    to_behaviour = _learner_to_behaviour(
        recipe, target_logprobs, proximal_logprobs, behaviour_logprobs, action_mask
    )
    weight = recipe.weight(to_behaviour, action_mask, turn_ids)
    target = fill_masked(target_logprobs.to(log_ratios.dtype), action_mask)
    spread = advantages.to(target.dtype)[:, None].expand(action_mask.shape)
    inputs = SurrogateInputs(target, log_ratios, spread, action_mask)
    token = recipe.surrogate(inputs)
    weighted = token.losses * weight.weight  # 0 where rejected; the counts of `aggregate` stay
    loss = aggregate(weighted, action_mask, recipe.aggregation, denominators)
    view = StepView(
        log_ratios=log_ratios.detach(),
        to_behaviour=to_behaviour,
        weight=weight,
        weight_level=recipe.weight.level,
        token=token,
        advantages=spread,
        mask=action_mask,
        lag_versions=lag_versions,
        turn_ids=turn_ids,
    )
    return Objective(loss, additive_sums(view) | {"loss": loss.detach().double()})


def _target_to_proximal(
    recipe: Recipe, target: Tensor, recomputed: Tensor | None, behaviour: Tensor, mask: Tensor
) -> Tensor:
    """Token log theta/prox [B, T], with gradient."""
    if recomputed is None and not recipe.needs_proximal_pass:
        recomputed = target
    return log_ratio(target, proximal_anchor(recipe.proximal, recomputed, behaviour), mask)


def _learner_to_behaviour(
    recipe: Recipe, target: Tensor, recomputed: Tensor | None, behaviour: Tensor, mask: Tensor
) -> Tensor:
    """Token log learner/mu [B, T], detached: what lag and engine mismatch did to the batch.

    The learner is the proximal policy where it was scored, else the target policy.
    """
    of_target = recipe.proximal is Proximal.BEHAVIOUR or isinstance(
        recipe.weight, TargetBehaviourWeight
    )
    learner = target if of_target or recomputed is None else recomputed
    return log_ratio(learner.detach(), behaviour.detach(), mask)


def _check_ids(mask: Tensor, lag_versions: Tensor, turn_ids: Tensor) -> None:
    require_mask("action_mask", mask)
    for name, ids, below in (
        ("lag_versions", lag_versions, None),
        ("turn_ids", turn_ids, mask.shape[1]),
    ):
        require_integers(name, ids)
        require_shape(name, ids, tuple(mask.shape))
        require_range(name, ids, mask, 0, below)


def _check_numbers(
    mask: Tensor,
    advantages: Tensor,
    target: Tensor,
    recomputed: Tensor | None,
    behaviour: Tensor,
) -> None:
    require_floating("advantages", advantages)
    require_shape("advantages", advantages, (mask.shape[0],))
    require_finite("advantages", advantages, mask.any(dim=-1))
    named = {"target_logprobs": target, "behaviour_logprobs": behaviour}
    if recomputed is not None:
        named["proximal_logprobs"] = recomputed
    for name, logprobs in named.items():
        require_floating(name, logprobs)
        require_shape(name, logprobs, tuple(mask.shape))
        require_finite(name, logprobs.detach(), mask)
