"""What may not be combined, with the reason and the way out. One short rule a function.

theta/mu = theta/prox x prox/mu     each factor may act once
one decision a trajectory           needs a loss that counts trajectories
V-trace                             has its ratio inside its advantage
a number a token                    needs a surrogate that takes one
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from correction.advantage_parts import Opob
from correction.aggregation import Aggregation
from correction.bounds import SIGNED_BOUNDS, Bound
from correction.errors import RecipeError
from correction.learner_parts import NoCritic, ValueCritic
from correction.needs import Need
from correction.penalty_parts import KlPlace, PromptKl, PromptWeights
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
        _whole_sequence_is_trusted_as_a_whole,
        _vtrace_is_not_weighed_by_prompt,
        _maxrl_sees_plain_rewards,
        _signed_bound_has_one_sign,
        _baseline_sees_the_weights,
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
    rewarded = any(part.kind == "overlong_penalty" for part in recipe.shaping)
    if recipe.advantage.kind != "return" or rewarded:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} looks at no reward; another advantage or an "
            "overlong penalty would have no effect. Set advantage = return and take it out"
        )


def _whole_sequence_is_trusted_as_a_whole(recipe: Recipe) -> None:
    tokenwise = [mask.kind for mask in recipe.trust if not mask.whole_trajectory]
    if recipe.surrogate.whole_sequence and tokenwise:
        raise RecipeError(
            f"correction.trust: {tokenwise[0]} rejects single tokens, but {recipe.surrogate.kind} "
            "has one ratio a trajectory, through which they would be trained all the same. Take a "
            "mask of whole trajectories (veto, k3_limit, geometric_band, trm, opsm, or max_lag "
            "with unit = trajectory)"
        )


def _vtrace_is_not_weighed_by_prompt(recipe: Recipe) -> None:
    penalty = recipe.penalty_of(PromptKl)
    weighed = penalty is not None and penalty.weights is not PromptWeights.NONE
    if isinstance(recipe.advantage, VTrace) and weighed:
        raise RecipeError(
            "correction.penalties.prompt_kl.weights: weighs advantages of the batch, but vtrace "
            "makes its own in every pass. Set penalties.prompt_kl.weights = none"
        )


def _maxrl_sees_plain_rewards(recipe: Recipe) -> None:
    if recipe.advantage.kind != "maxrl":
        return
    kl = recipe.kl
    penalised = any(part.kind == "overlong_penalty" for part in recipe.shaping)
    if penalised or (kl is not None and kl.place is KlPlace.REWARD):
        raise RecipeError(
            "correction: advantage maxrl is for rewards of 0 and 1; an overlong penalty or a KL in "
            "the reward makes others of them. Set shaping = overlong_filter, or "
            "penalties.kl.place = loss"
        )


def _signed_bound_has_one_sign(recipe: Recipe) -> None:
    weight = recipe.weight
    if isinstance(weight, NoWeight) or weight.bound not in SIGNED_BOUNDS:
        return
    if recipe.advantage.a_token and weight.level is not Level.TOKEN:
        raise RecipeError(
            f"correction.weight.bound: {weight.bound} goes by the sign of the advantage, and a "
            f"weight at level {weight.level} needs one sign; advantage {recipe.advantage.kind} has "
            "a number a token. Set weight.level = token or an advantage of whole trajectories"
        )


def _baseline_sees_the_weights(recipe: Recipe) -> None:
    """The optimal baseline is optimal for the weights of the loss, and for no others."""
    advantage, weight = recipe.advantage, recipe.weight
    if not isinstance(advantage, Opob):
        return
    same = (
        not isinstance(weight, NoWeight)
        and weight.level is Level.SEQUENCE_PRODUCT
        and weight.bound is Bound.TRUNCATE
        and weight.high == advantage.max_weight
    )
    if not same:
        raise RecipeError(
            "correction: advantage opob is the best baseline for trajectory weights truncated at "
            f"its max_weight ({advantage.max_weight}); the loss must use the same. Set "
            "weight.level = sequence_product, weight.bound = truncate and weight.high = "
            "advantage.max_weight"
        )


def _kinds_stand_once(recipe: Recipe) -> None:
    for slot in ("trust", "penalties", "shaping"):
        kinds = [part.kind for part in getattr(recipe, slot)]
        twice = {kind for kind in kinds if kinds.count(kind) > 1}
        if twice:
            raise RecipeError(f"correction.{slot}: {min(twice)} stands in it twice")
