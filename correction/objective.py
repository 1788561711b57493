"""The loss of a micro-batch, and the additive sums that say what it did.

    prepared = prepare(recipe, view, ...)                     whole batch, once: `preparation`
    objective = policy_objective(recipe, inputs, prepared.rows(...), denominators)
    objective.loss.backward()                                 gradients add up
    metrics = summarise(sums of all parts)                    `pooling`

Order inside: proximal -> weight and trust masks, detached -> surrogate -> penalties, critic
-> aggregation by the original counts -> diagnostics. Nothing here reduces across ranks: global
counts come in as numbers, sums go out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from correction.aggregation import Aggregation, Denominators, aggregate, check_denominators
from correction.checks import require_given
from correction.composition import Recipe
from correction.diagnostics import StepView, additive_sums
from correction.errors import InputError
from correction.learner_parts import NoCritic
from correction.masks import fill_masked
from correction.penalties import KlEstimator, estimate_kl
from correction.penalty_parts import PenaltyInputs, PromptKl
from correction.policy_inputs import PolicyInputs
from correction.pooling import add_sums, summarise
from correction.preparation import Prepared, prepare
from correction.prompt_penalty import prompt_kl
from correction.proximal import Proximal, proximal_anchor
from correction.ratios import MAX_LOG_RATIO, log_ratio
from correction.surrogate_parts import SurrogateInputs
from correction.token_advantage_parts import ValueSource, VTrace
from correction.trust_parts import TrustInputs
from correction.vtrace import VtraceEstimate
from correction.weight_parts import TargetBehaviourWeight, without

__all__ = [
    "Denominators",
    "Objective",
    "PolicyInputs",
    "Prepared",
    "add_sums",
    "policy_objective",
    "prepare",
    "prompt_share",
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


@dataclass(frozen=True, slots=True, eq=False)
class _Ratios:
    """Token log ratios [B, T] of a micro-batch, 0 where masked.

    anchor: log prox, filled. update: theta/prox, with gradient. away: learner/mu, the learner of
    before the step where it was scored. whole: theta/mu now. weighing: what the weight is made of,
    prox/mu or theta/mu. The last three are detached.
    """

    target: Tensor
    behaviour: Tensor
    anchor: Tensor
    update: Tensor
    away: Tensor
    whole: Tensor
    weighing: Tensor


def policy_objective(
    recipe: Recipe, inputs: PolicyInputs, prepared: Prepared, denominators: Denominators
) -> Objective:
    """Loss and additive sums of one micro-batch of whole trajectories.

    prepared: the rows of the micro-batch. denominators: counts of the global batch. What stands at
    masked places never matters, NaN included. 16-bit logprobs are widened to float32; float64
    stays. Raises InputError for what `PolicyInputs` refuses, for tensors that the recipe needs and
    that are missing, and for denominators smaller than the micro-batch.
    """
    mask = prepared.action_mask
    prepared.check()
    inputs.check(mask)
    check_denominators(mask, denominators)
    ratios = _ratios(recipe, inputs, prepared)
    trace = _trace(recipe, inputs, prepared, ratios)
    advantages = prepared.advantages if trace is None else trace.advantages
    advantages = fill_masked(advantages.to(ratios.target.dtype), mask)

    weight = recipe.weight(ratios.weighing, mask, inputs.turn_ids, advantages)
    rejected = _rejected(recipe, inputs, prepared, ratios, advantages)
    weight = without(weight, rejected)
    token, measures = recipe.surrogate(
        SurrogateInputs(
            target_logprobs=ratios.target,
            anchor_logprobs=ratios.anchor,
            behaviour_logprobs=ratios.behaviour,
            log_ratios=ratios.update,
            advantages=advantages,
            mask=mask,
            log_expectation=prepared.log_expectation,
            head_target_logprobs=inputs.head_target_logprobs,
            head_behaviour_logprobs=inputs.head_behaviour_logprobs,
        )
    )
    # 0 where rejected; the counts of `aggregate` stay.
    weighted = token.losses * weight.weight
    shares = {"policy": aggregate(weighted, mask, recipe.aggregation, denominators)}
    shares |= _penalties(recipe, inputs, prepared, ratios, denominators)
    shares |= _critic(recipe, inputs, prepared, trace, denominators)
    loss = sum(shares.values(), start=ratios.target.new_zeros(()))
    view = StepView(
        log_ratios=ratios.update.detach(),
        to_behaviour=ratios.away,
        weight=weight,
        weight_level=recipe.weight.level,
        token=token,
        advantages=advantages,
        mask=mask,
        lag_versions=inputs.lag_versions,
        turn_ids=inputs.turn_ids,
        rejected=rejected,
        measures={**measures, **_measures(inputs, prepared, ratios, trace)},
    )
    sums = additive_sums(view)
    sums |= {f"loss_{name}": share.detach().double() for name, share in shares.items()}
    return Objective(loss, sums | {"loss": loss.detach().double()})


def _ratios(recipe: Recipe, inputs: PolicyInputs, prepared: Prepared) -> _Ratios:
    mask, recomputed = prepared.action_mask, inputs.proximal_logprobs
    if recomputed is None:
        recomputed = prepared.scores
    if recomputed is None and not recipe.needs_proximal_pass:
        recomputed = inputs.target_logprobs
    anchor = proximal_anchor(
        recipe.proximal,
        recomputed,
        inputs.behaviour_logprobs,
        target_logprobs=inputs.target_logprobs,
        lag_versions=inputs.lag_versions,
        mask=mask,
    )
    update = log_ratio(inputs.target_logprobs, anchor, mask)
    behaviour = fill_masked(inputs.behaviour_logprobs.detach().to(update.dtype), mask)
    target = fill_masked(inputs.target_logprobs.to(update.dtype), mask)
    whole = target.detach() - behaviour
    bypass = recipe.proximal is Proximal.BEHAVIOUR
    of_target = bypass or isinstance(recipe.weight, TargetBehaviourWeight)
    weighing = whole if of_target else log_ratio(anchor.detach(), behaviour, mask)
    return _Ratios(
        target=target,
        behaviour=behaviour,
        anchor=fill_masked(anchor.to(update.dtype), mask),
        update=update,
        # What lag and engine mismatch did to the batch: the proximal policy says it where it is the
        # learner's own of before the step. A log-linear one lies nearer to mu by construction.
        away=weighing if recipe.proximal is Proximal.RECOMPUTE else whole,
        whole=whole,
        weighing=weighing,
    )


def _trace(
    recipe: Recipe, inputs: PolicyInputs, prepared: Prepared, ratios: _Ratios
) -> VtraceEstimate | None:
    """V-trace's targets and advantages under the present theta, where the recipe has them."""
    advantage = recipe.advantage
    if not isinstance(advantage, VTrace):
        return None
    if advantage.values is ValueSource.CRITIC:
        values, final = inputs.critic_values()
        cut = prepared.truncated & advantage.bootstrap_truncated
        bootstrap = final.where(cut, final.new_zeros(()))
    else:
        baseline = require_given("baseline", prepared.baseline, "V-trace without a critic")
        values = baseline[:, None].expand(prepared.action_mask.shape)
        bootstrap = baseline.new_zeros(baseline.shape)
    return advantage.trace(
        ratios.whole,
        prepared.token_rewards,
        values,
        bootstrap,
        prepared.action_mask,
        inputs.turn_ids,
    )


def _rejected(
    recipe: Recipe,
    inputs: PolicyInputs,
    prepared: Prepared,
    ratios: _Ratios,
    advantages: Tensor,
) -> dict[str, Tensor]:
    """Tokens [B, T] that each trust mask rejects."""
    mask = prepared.action_mask
    view = TrustInputs(
        to_behaviour=ratios.away,
        target_to_behaviour=ratios.whole,
        target_logprobs=ratios.target.detach(),
        behaviour_logprobs=ratios.behaviour,
        advantages=advantages,
        mask=mask,
        lag_versions=inputs.lag_versions,
    )
    kept = {
        rule.kind: prepared.keep[rule.kind] if rule.whole_batch else rule(view)
        for rule in recipe.trust
    }
    return {kind: mask & ~keep for kind, keep in kept.items()}


def _penalties(
    recipe: Recipe,
    inputs: PolicyInputs,
    prepared: Prepared,
    ratios: _Ratios,
    denominators: Denominators,
) -> dict[str, Tensor]:
    """Shares of the loss by penalty."""
    view = PenaltyInputs(
        target_logprobs=ratios.target,
        behaviour_logprobs=ratios.behaviour,
        mask=prepared.action_mask,
        kl_coefficient=prepared.kl_coefficient,
        reference_logprobs=prepared.reference_logprobs,
        entropy=None if inputs.entropy is None else inputs.entropy.to(ratios.target.dtype),
    )
    shares = {}
    for part in recipe.penalties:
        losses = part.token_losses(view)
        if losses is not None:
            shares[part.kind] = aggregate(
                losses, prepared.action_mask, recipe.aggregation, denominators
            )
    return shares | prompt_share(recipe, inputs, denominators)


def prompt_share(
    recipe: Recipe, inputs: PolicyInputs, denominators: Denominators
) -> dict[str, Tensor]:
    """The prompt penalty's share of the loss, where the recipe has one; under its kind.

    It does not look at actions: rows whose actions the loss may not see have it all the same.
    Prompts of one token have none. Raises InputError for missing prompts.
    """
    penalty, prompt = recipe.penalty_of(PromptKl), inputs.prompt
    if penalty is None:
        return {}
    if prompt is None:
        raise InputError("prompt: missing, the prompt penalty needs it")
    if not bool(prompt.mask.any()):
        return {penalty.kind: inputs.target_logprobs.new_zeros(())}
    losses = prompt_kl(prompt.target_logprobs, prompt.reference_logprobs, prompt.mask)
    return {penalty.kind: penalty.coefficient * losses.sum() / denominators.prompt_tokens}


def _critic(
    recipe: Recipe,
    inputs: PolicyInputs,
    prepared: Prepared,
    trace: VtraceEstimate | None,
    denominators: Denominators,
) -> dict[str, Tensor]:
    """The critic's share of the loss, over action tokens whatever the policy's aggregation is."""
    if isinstance(recipe.critic, NoCritic):
        return {}
    targets = prepared.value_targets if trace is None else trace.value_targets
    result = recipe.critic.losses(
        require_given("values", inputs.values, "a critic"),
        require_given("value_targets", targets, "a critic"),
        prepared.action_mask,
        prepared.old_values,
    )
    losses = recipe.critic.coefficient * result.losses
    share = aggregate(losses, prepared.action_mask, Aggregation.TOKEN_MEAN, denominators)
    return {"critic": share}


def _measures(
    inputs: PolicyInputs, prepared: Prepared, ratios: _Ratios, trace: VtraceEstimate | None
) -> dict[str, Tensor]:
    """Figures of each token [B, T], by name, whose means are metrics."""
    measures = {}
    if prepared.reference_logprobs is not None:
        away = log_ratio(ratios.target.detach(), prepared.reference_logprobs, prepared.action_mask)
        measures["kl_k1_theta_reference"] = away
        measures["kl_k3_theta_reference"] = estimate_kl(
            away.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), KlEstimator.K3
        )
    if inputs.entropy is not None:
        measures["entropy"] = inputs.entropy.detach()
    if trace is not None:
        measures["vtrace_rho"] = trace.rho
        measures["vtrace_advantage"] = trace.advantages
    targets = prepared.value_targets if trace is None else trace.value_targets
    if inputs.values is not None and targets is not None:
        measures["value"] = inputs.values.detach()
        measures["value_error_squared"] = (inputs.values.detach() - targets).square()
    return measures
