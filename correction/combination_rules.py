"""What may not be combined, with the reason and the way out. One short rule a function.

theta/mu = theta/prox x prox/mu     each factor may act once
one decision a trajectory           needs a loss that counts trajectories
V-trace                             has its ratio inside its advantage
a number a token                    needs a surrogate that takes one
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from correction.aggregation import Aggregation
from correction.errors import RecipeError
from correction.learner_parts import NoCritic, ValueCritic
from correction.needs import Need
from correction.proximal import Proximal
from correction.ratios import Level
from correction.token_advantage_parts import Gae, VTrace
from correction.weight_parts import NoWeight, ProximalBehaviourWeight, TargetBehaviourWeight

if TYPE_CHECKING:
    from correction.composition import Recipe


def check_combination(recipe: Recipe) -> None:
    """Raise RecipeError for the first rule that is broken."""
    for rule in (
        _bypass_counts_once,
        _prox_is_not_mu,
        _target_weight_counts_once,
        _own_weight_counts_once,
        _whole_sequence_is_counted_once,
        _whole_sequence_has_one_weight,
        _whole_sequence_has_one_advantage,
        _vtrace_stands_alone,
        _values_have_a_critic,
        _critic_has_targets,
        _value_clip_has_old_values,
        _imitation_is_plain,
        _kinds_stand_once,
    ):
        rule(recipe)


def _bypass_counts_once(recipe: Recipe) -> None:
    bypass = recipe.proximal is Proximal.BEHAVIOUR
    if bypass and recipe.surrogate.has_ratio and not isinstance(recipe.weight, NoWeight):
        raise RecipeError(
            f"correction: proximal = behaviour puts theta/mu inside {recipe.surrogate.kind}; a "
            "weight beside it counts the ratio twice. Set weight = none or proximal = recompute"
        )


def _prox_is_not_mu(recipe: Recipe) -> None:
    proximal_weight = recipe.weight.kind == ProximalBehaviourWeight.kind
    if recipe.proximal is Proximal.BEHAVIOUR and proximal_weight:
        raise RecipeError(
            "correction: proximal = behaviour makes prox/mu equal to 1, so this weight corrects "
            "nothing. Set weight = target_behaviour or proximal = recompute"
        )


def _target_weight_counts_once(recipe: Recipe) -> None:
    if isinstance(recipe.weight, TargetBehaviourWeight) and recipe.surrogate.has_ratio:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} holds theta/prox; the weight theta/mu counts it "
            "twice. Set weight = proximal_behaviour or surrogate = reinforce"
        )


def _own_weight_counts_once(recipe: Recipe) -> None:
    if recipe.surrogate.own_weight and not isinstance(recipe.weight, NoWeight):
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} has theta/mu inside; a weight beside it counts "
            "the ratio twice. Set weight = none"
        )


def _whole_sequence_is_counted_once(recipe: Recipe) -> None:
    wanted = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    if recipe.surrogate.whole_sequence and recipe.aggregation is not wanted:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} has one loss a trajectory, {recipe.aggregation} "
            "would weigh it by length. Set aggregation = sequence_mean_token_mean"
        )


def _whole_sequence_has_one_weight(recipe: Recipe) -> None:
    if not recipe.surrogate.whole_sequence or isinstance(recipe.weight, NoWeight):
        return
    if recipe.weight.level not in (Level.GEOMETRIC, Level.SEQUENCE_PRODUCT):
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} has one ratio a trajectory, the weight is taken "
            f"at level {recipe.weight.level}. Set weight.level = geometric or sequence_product"
        )


def _whole_sequence_has_one_advantage(recipe: Recipe) -> None:
    if recipe.surrogate.whole_sequence and recipe.advantage.a_token:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} makes one decision a trajectory, but advantage "
            f"{recipe.advantage.kind} has a number a token. Set surrogate = ppo_clip or an "
            "advantage of whole trajectories, as grpo"
        )


def _vtrace_stands_alone(recipe: Recipe) -> None:
    if not isinstance(recipe.advantage, VTrace):
        return
    plain = recipe.surrogate.kind == "reinforce"
    if not plain or not isinstance(recipe.weight, NoWeight):
        raise RecipeError(
            "correction: advantage vtrace holds its clipped theta/mu already; a weight, a ratio or "
            "a clip beside it counts it twice. Set surrogate = reinforce and weight = none"
        )


def _values_have_a_critic(recipe: Recipe) -> None:
    if Need.VALUES in recipe.needs and isinstance(recipe.critic, NoCritic):
        raise RecipeError(
            f"correction: advantage {recipe.advantage.kind} needs values, but there is no critic. "
            "Set critic = value, or for vtrace advantage.values = group"
        )


def _critic_has_targets(recipe: Recipe) -> None:
    if isinstance(recipe.critic, ValueCritic) and Need.VALUES not in recipe.needs:
        raise RecipeError(
            f"correction: critic = value would be trained for nothing: advantage "
            f"{recipe.advantage.kind} uses no values. Set critic = none or advantage = gae"
        )


def _value_clip_has_old_values(recipe: Recipe) -> None:
    critic = recipe.critic
    if (
        isinstance(critic, ValueCritic)
        and critic.clip > 0
        and not isinstance(recipe.advantage, Gae)
    ):
        raise RecipeError(
            "correction: critic.clip needs the values of before the step, which only advantage "
            f"gae keeps; {recipe.advantage.kind} uses the newest. Set critic.clip = 0"
        )


def _imitation_is_plain(recipe: Recipe) -> None:
    if recipe.surrogate.uses_advantages:
        return
    if not isinstance(recipe.weight, NoWeight) or recipe.trust:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} imitates the tokens as they are; a ratio to mu "
            "says nothing about an expert's. Set weight = none and trust = []"
        )


def _kinds_stand_once(recipe: Recipe) -> None:
    for slot in ("trust", "penalties", "shaping"):
        kinds = [part.kind for part in getattr(recipe, slot)]
        twice = {kind for kind in kinds if kinds.count(kind) > 1}
        if twice:
            raise RecipeError(f"correction.{slot}: {min(twice)} stands in it twice")
