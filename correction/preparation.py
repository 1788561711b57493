"""What is decided once for a whole batch, before the first optimiser step on it.

    view -> shaped rewards -> KL in the reward -> advantages of all members -> prompt weights
         -> masks that need the whole batch -> what the loss may see

    prepared = prepare(recipe, view, limit_tokens=..., kl_coefficient=...)
    prepared.rows(index, columns)        a micro-batch's share

Everything is detached and the same on every rank, because every rank sees the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from correction.advantage_parts import Advantages
from correction.aggregation import Denominators
from correction.batch_view import BatchView
from correction.checks import require_finite, require_floating, require_mask, require_shape
from correction.composition import Recipe
from correction.group_statistics import find_groups, group_is_constant, group_sum
from correction.masks import fill_masked
from correction.needs import Need
from correction.penalties import kl_token_rewards
from correction.penalty_parts import KlPlace, PromptKl, PromptWeights
from correction.prompt_penalty import prompt_weights
from correction.proximal import Proximal
from correction.ratios import log_ratio
from correction.token_advantage_parts import VTrace
from correction.token_advantages import terminal_rewards
from correction.trust_parts import TrustInputs


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prepared:
    """Constants of a batch, or of a micro-batch's rows of it.

    action_mask: [N, T] bool, what the loss may see. advantages: [N, T], 0 where masked.
    token_rewards: [N, T]. truncated: [N] bool. kl_coefficient: in force for this batch.
    baseline: [N], a constant V. value_targets, old_values: [N, T], for the critic.
    keep: {rule: bool [N, T]} of masks that need the whole batch.
    log_expectation: [N], of the group. scores, reference_logprobs: [N, T].
    metrics: of the whole batch, as they stand.
    """

    action_mask: Tensor
    advantages: Tensor
    token_rewards: Tensor
    truncated: Tensor
    kl_coefficient: float = 0.0
    baseline: Tensor | None = None
    value_targets: Tensor | None = None
    old_values: Tensor | None = None
    keep: Mapping[str, Tensor] = field(default_factory=dict)
    log_expectation: Tensor | None = None
    scores: Tensor | None = None
    reference_logprobs: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise InputError for a mask, advantages or rewards that no loss can be made of."""
        require_mask("action_mask", self.action_mask)
        for name in ("advantages", "token_rewards"):
            numbers = getattr(self, name)
            require_floating(name, numbers)
            require_shape(name, numbers, tuple(self.action_mask.shape))
            require_finite(name, numbers, self.action_mask)

    def rows(self, index: Tensor, columns: int) -> Prepared:
        """The rows `index` [B] int64, cut to their first `columns` places."""
        changes: dict[str, Any] = {
            entry.name: _cut(getattr(self, entry.name), index, columns)
            for entry in fields(self)
            if isinstance(getattr(self, entry.name), Tensor)
        }
        keep = {rule: _cut(mask, index, columns) for rule, mask in self.keep.items()}
        return replace(self, keep=keep, **changes)

    def denominators(self, limit_tokens: int, prompt_tokens: int = 0) -> Denominators:
        """Counts of the batch that the loss may see; 1 where there is nothing left of it.

        limit_tokens: the generation limit of one trajectory. prompt_tokens: of all prompts.
        """
        return Denominators(
            action_tokens=max(1, int(self.action_mask.sum())),
            trajectories=max(1, int(self.action_mask.any(dim=-1).sum())),
            max_tokens=limit_tokens,
            prompt_tokens=prompt_tokens,
        )


def prepare(
    recipe: Recipe, view: BatchView, *, limit_tokens: int, kl_coefficient: float | None = None
) -> Prepared:
    """All that `recipe` decides once for the batch `view`.

    limit_tokens: the generation limit of one trajectory. kl_coefficient: in force now, where it
    adapts; None takes the recipe's. Raises InputError for what the estimators refuse: a group of
    one, a tensor that the recipe needs and that is missing, scores of another version.
    """
    earned = view.rewards
    kl = recipe.kl
    coefficient = kl_coefficient if kl_coefficient is not None else kl.coefficient if kl else 0.0
    for part in recipe.shaping:
        view = replace(view, rewards=part.rewards(view, limit_tokens))
    view, token_rewards = _with_token_rewards(recipe, view, coefficient)
    made = recipe.advantage(view, token_rewards)
    mask = view.action_mask
    for part in recipe.shaping:
        mask = mask & part.action_mask(view)
    advantages = _weighed(recipe, view, _on_tokens(made.values, view.action_mask))
    return Prepared(
        action_mask=mask,
        advantages=fill_masked(advantages, mask),
        token_rewards=fill_masked(token_rewards, mask),
        truncated=view.truncated,
        kl_coefficient=coefficient,
        baseline=made.baseline,
        value_targets=made.value_targets,
        old_values=view.values,
        keep=_whole_batch_masks(recipe, view, advantages, mask),
        log_expectation=recipe.surrogate.prepare(view),
        scores=view.scores,
        reference_logprobs=view.reference_logprobs,
        metrics=_metrics(recipe, replace(view, rewards=earned), made, mask),
    )


def _with_token_rewards(
    recipe: Recipe, view: BatchView, coefficient: float
) -> tuple[BatchView, Tensor]:
    """Rewards token by token, and the view with their sums as the rewards of trajectories."""
    token_rewards = terminal_rewards(view.rewards, view.action_mask)
    kl = recipe.kl
    if kl is None or kl.place is KlPlace.LOSS:
        return view, token_rewards
    sampler = view.behaviour_logprobs
    if recipe.proximal is Proximal.RECOMPUTE:
        sampler = view.required("scores", Need.SCORES)
    penalty = kl_token_rewards(
        sampler, view.reference_logprobs, view.action_mask, coefficient=coefficient
    )
    token_rewards = token_rewards + penalty.to(token_rewards.dtype)
    return replace(view, rewards=token_rewards.sum(dim=-1)), token_rewards


def _on_tokens(values: Tensor, mask: Tensor) -> Tensor:
    spread = values[:, None].expand(mask.shape) if values.dim() == 1 else values
    return fill_masked(spread, mask)


def _weighed(recipe: Recipe, view: BatchView, advantages: Tensor) -> Tensor:
    """Advantages times the weight of their prompt, where the recipe weighs prompts."""
    penalty = recipe.penalty_of(PromptKl)
    if penalty is None or penalty.weights is PromptWeights.NONE:
        return advantages
    surprise = view.required("prompt_nll", Need.PROMPT)
    groups = find_groups(view.group_index)
    mean = (group_sum(surprise, groups) / groups.size).to(surprise.dtype)
    a_prompt = surprise.new_zeros(groups.count).scatter(0, groups.member_of, mean)
    told = a_prompt > 0  # a prompt of one token has no logprob: it weighs as the mean one does
    if not bool(told.any()):
        return advantages
    a_prompt = torch.where(told, a_prompt, a_prompt[told].mean())
    weights = prompt_weights(a_prompt, clip=penalty.weight_clip or None)[groups.member_of]
    return advantages * weights.to(advantages.dtype)[:, None]


def _whole_batch_masks(
    recipe: Recipe, view: BatchView, advantages: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Masks over all of the batch at once: learner/mu of before the first step."""
    rules = [rule for rule in recipe.trust if rule.whole_batch]
    if not rules:
        return {}
    if not bool(mask.any()):
        return {rule.kind: torch.ones_like(mask) for rule in rules}
    scores = fill_masked(view.required("scores", Need.SCORES), mask)
    behaviour = fill_masked(view.behaviour_logprobs, mask)
    away = log_ratio(scores, behaviour, mask)
    inputs = TrustInputs(
        to_behaviour=away,
        target_to_behaviour=away,
        target_logprobs=scores,
        behaviour_logprobs=behaviour,
        advantages=advantages,
        mask=mask,
        lag_versions=torch.zeros_like(view.turn_ids),
    )
    return {rule.kind: rule(inputs) for rule in rules}


def _metrics(recipe: Recipe, view: BatchView, made: Advantages, mask: Tensor) -> dict[str, float]:
    """Figures of the whole batch that no sum over tokens would give. view: rewards as earned."""
    groups = find_groups(view.group_index)
    constant = group_is_constant(view.rewards, groups).double()
    a_group = constant.new_zeros(groups.count).scatter(0, groups.member_of, constant)
    removed = int(view.action_mask.sum()) - int(mask.sum())
    metrics = {
        "zero_variance_group_fraction": float(a_group.mean()),
        "overlong_filtered_fraction": removed / int(view.action_mask.sum()),
    }
    if isinstance(recipe.advantage, VTrace):  # its advantages are those of a pass
        return metrics
    advantages = _on_tokens(made.values, view.action_mask)[view.action_mask].double()
    return metrics | {
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std(correction=0)),
    }


def _cut(values: Tensor, index: Tensor, columns: int) -> Tensor:
    chosen = values[index]
    return chosen[:, :columns] if chosen.dim() > 1 else chosen
