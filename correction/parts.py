"""The parts a recipe is made of, by slot and by name: what a config names and may override.

    slot          one kind of
    advantage     return, baseline, rloo, grpo, dr_grpo, tail, maxrl, opob, reco, reinforce_pp,
                  reinforce_pp_baseline, gae, teacher, shared_prefix, vtrace
    proximal      recompute, behaviour, log_linear
    weight        none, proximal_behaviour, target_behaviour
    surrogate     ppo_clip, gspo, gepo, cispo, sapo, reinforce, reco_clip, score_centered,
                  cross_entropy
    aggregation   token_mean, sequence_mean_token_mean, ...
    critic        none, value
    control       none, ess_learning_rate
    group_filter  none, mixed_rewards

    slot          any of
    trust         max_lag, geometric_band, k3_limit, trm, veto, dppo_tv, dppo_kl, kpop, m2, opsm
    penalties     kl, prompt_kl, entropy, log_ratio_square, pretraining
    shaping       overlong_penalty, overlong_filter

A new method is a pure function in its module and a part, named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import TypeAlias

from correction.advantage_parts import (
    Baseline,
    DrGrpo,
    Grpo,
    MaxRl,
    Opob,
    Reco,
    Return,
    Rloo,
    Tail,
    TrajectoryAdvantage,
)
from correction.aggregation import Aggregation
from correction.bounds import BOUND_PARAMETERS, Bound
from correction.group_filter import GroupFilter
from correction.learner_parts import EssLearningRate, NoControl, NoCritic, ValueCritic
from correction.penalty_parts import (
    Entropy,
    Kl,
    KlPlace,
    LogRatioSquare,
    Penalty,
    Pretraining,
    PromptKl,
    PromptWeights,
)
from correction.proximal import Proximal
from correction.shaping_parts import OverlongFilter, OverlongPenalty, Shaping
from correction.steps import StepUnit
from correction.surrogate_parts import (
    Cispo,
    CrossEntropy,
    Gepo,
    Gspo,
    PolicySurrogate,
    PpoClip,
    RecoClip,
    Reinforce,
    Sapo,
    ScoreCentered,
)
from correction.token_advantage_parts import (
    Gae,
    ReinforcePp,
    ReinforcePpBaseline,
    SharedPrefix,
    Teacher,
    TokenAdvantage,
    ValueSource,
    VTrace,
)
from correction.trust_parts import (
    DppoKl,
    DppoTv,
    GeometricBand,
    K3Limit,
    Kpop,
    MaxLag,
    Opsm,
    SecondMoment,
    Trm,
    TrustMask,
    Veto,
)
from correction.weight_parts import (
    NoWeight,
    ProximalBehaviourWeight,
    TargetBehaviourWeight,
)

Advantage: TypeAlias = TrajectoryAdvantage | TokenAdvantage
Weight: TypeAlias = NoWeight | ProximalBehaviourWeight | TargetBehaviourWeight
Critic: TypeAlias = NoCritic | ValueCritic
Control: TypeAlias = NoControl | EssLearningRate
Kinded: TypeAlias = (
    Advantage | Weight | PolicySurrogate | Critic | Control | TrustMask | Penalty | Shaping
)
Part: TypeAlias = Kinded | Proximal | Aggregation | GroupFilter


def _by_kind(*parts: Kinded) -> dict[str, Part]:
    return {part.kind: part for part in parts}


def _named(kinds: type[Proximal] | type[Aggregation] | type[GroupFilter]) -> dict[str, Part]:
    return {part.value: part for part in kinds}


PARTS: Mapping[str, Mapping[str, Part]] = {
    "advantage": _by_kind(
        *(Return(), Baseline(), Rloo(), Grpo(), DrGrpo(), Tail(), MaxRl(), Opob(), Reco()),
        *(ReinforcePp(), ReinforcePpBaseline(), Gae(), Teacher(), SharedPrefix(), VTrace()),
    ),
    "proximal": _named(Proximal),
    "weight": _by_kind(NoWeight(), ProximalBehaviourWeight(), TargetBehaviourWeight()),
    "surrogate": _by_kind(
        *(PpoClip(), Gspo(), Gepo(), Cispo(), Sapo(), Reinforce(), RecoClip()),
        *(ScoreCentered(), CrossEntropy()),
    ),
    "aggregation": _named(Aggregation),
    "critic": _by_kind(NoCritic(), ValueCritic()),
    "control": _by_kind(NoControl(), EssLearningRate()),
    "group_filter": _named(GroupFilter),
}
"""Every slot that holds one part, with its kinds by name, at their default parameters."""

SEVERAL: Mapping[str, Mapping[str, Part]] = {
    "trust": _by_kind(
        *(MaxLag(), GeometricBand(), K3Limit(), Trm(), Veto(), DppoTv(), DppoKl(), Kpop()),
        *(SecondMoment(), Opsm()),
    ),
    "penalties": _by_kind(Kl(), PromptKl(), Entropy(), LogRatioSquare(), Pretraining()),
    "shaping": _by_kind(OverlongPenalty(), OverlongFilter()),
}
"""Every slot that holds any number of parts, each kind at most once."""


def kind_of(part: Part) -> str:
    """The name of a part in its slot."""
    return part.value if isinstance(part, StrEnum) else part.kind


def parameters_of(part: Part) -> dict[str, object]:
    """The parameters of a part that have an effect, with their values."""
    if isinstance(part, StrEnum):
        return {}
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    for idle in _without_effect(part):
        del values[idle]
    return values


def _without_effect(part: Kinded) -> set[str]:
    """Parameters that another one makes idle."""
    if isinstance(part, ProximalBehaviourWeight):
        return {"low", "high"} - BOUND_PARAMETERS[part.bound]
    if isinstance(part, ScoreCentered):
        return {"low", "high"} - BOUND_PARAMETERS[Bound(part.weight.value)]
    if isinstance(part, VTrace):
        idle = {"turn_level"} if part.unit is StepUnit.TOKEN else set()
        return idle | ({"bootstrap_truncated"} if part.values is ValueSource.GROUP else set())
    if isinstance(part, Gae) and part.length_alpha > 0:
        return {"gae_lambda"}
    if isinstance(part, Kl):
        idle = {"horizon"} if part.target == 0 else set()
        return idle | ({"estimator", "importance"} if part.place is KlPlace.REWARD else set())
    if isinstance(part, PromptKl) and part.weights is PromptWeights.NONE:
        return {"weight_clip"}
    return set()
