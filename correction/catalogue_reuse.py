"""Named methods whose idea is the reuse of lagged data. Papers: docs/methods.md."""

from __future__ import annotations

from correction.advantage_parts import DrGrpo, Grpo, Opob
from correction.aggregation import Aggregation
from correction.bounds import Bound
from correction.composition import Recipe
from correction.learner_parts import EssLearningRate, ValueCritic
from correction.penalty_parts import Entropy, Kl, LogRatioSquare
from correction.proximal import Proximal
from correction.ratios import Level
from correction.steps import StepUnit
from correction.surrogate_parts import (
    Cispo,
    Gepo,
    Gspo,
    PpoClip,
    Reinforce,
    Sapo,
    ScoreCentered,
)
from correction.token_advantage_parts import ValueSource, VTrace
from correction.trust_parts import DppoTv, GeometricBand, Opsm, SecondMoment
from correction.weight_parts import ProximalBehaviourWeight, TargetBehaviourWeight

AREAL_CAP = 5.0
"""Largest prox/mu that AReaL lets count."""

REUSE_RECIPES = (
    Recipe(
        name="decoupled_ppo",
        advantage=Grpo(),
        proximal=Proximal.RECOMPUTE,
        weight=ProximalBehaviourWeight(high=AREAL_CAP),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="ppo_bypass",
        advantage=Grpo(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="tis",
        advantage=Grpo(),
        proximal=Proximal.RECOMPUTE,
        weight=ProximalBehaviourWeight(high=2.0),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="icepop",
        advantage=Grpo(),
        proximal=Proximal.RECOMPUTE,
        weight=ProximalBehaviourWeight(bound=Bound.BAND, low=0.5, high=5.0),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="geometric_rejection",
        advantage=Grpo(),
        proximal=Proximal.RECOMPUTE,
        weight=ProximalBehaviourWeight(high=2.0),
        # The part's own band is for engine mismatch alone; lag needs a wider one.
        trust=(GeometricBand(low=0.98, high=1.02),),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="sequence_tis",
        advantage=DrGrpo(),
        weight=TargetBehaviourWeight(level=Level.SEQUENCE_PRODUCT, high=2.0),
        surrogate=Reinforce(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
    ),
    Recipe(
        name="a3po",
        advantage=Grpo(),
        proximal=Proximal.LOG_LINEAR,
        weight=ProximalBehaviourWeight(high=AREAL_CAP),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="gspo",
        advantage=Grpo(),
        surrogate=Gspo(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    ),
    Recipe(
        name="decoupled_gspo",
        advantage=Grpo(),
        proximal=Proximal.RECOMPUTE,
        # Geometric like the surrogate: the two factors then make theta/mu of the same kind.
        weight=ProximalBehaviourWeight(level=Level.GEOMETRIC, high=2.0),
        surrogate=Gspo(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    ),
    Recipe(
        name="gepo",
        advantage=Grpo(),
        surrogate=Gepo(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    ),
    Recipe(
        name="cispo",
        advantage=Grpo(),
        surrogate=Cispo(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="sapo",
        advantage=Grpo(),
        surrogate=Sapo(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    ),
    Recipe(
        name="aipo",
        advantage=DrGrpo(),
        weight=TargetBehaviourWeight(high=5.0),
        surrogate=Reinforce(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="topr",
        advantage=DrGrpo(),
        weight=TargetBehaviourWeight(level=Level.SEQUENCE_PRODUCT, bound=Bound.TOPR),
        surrogate=Reinforce(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
    ),
    Recipe(
        name="vespo",
        advantage=Grpo(),
        weight=TargetBehaviourWeight(level=Level.SEQUENCE_PRODUCT, bound=Bound.VESPO),
        surrogate=Reinforce(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    ),
    Recipe(
        name="m2po",
        advantage=Grpo(),
        weight=TargetBehaviourWeight(high=AREAL_CAP),
        trust=(SecondMoment(),),
        surrogate=Reinforce(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="dppo",
        advantage=DrGrpo(),
        weight=TargetBehaviourWeight(high=20.0),
        trust=(DppoTv(),),
        surrogate=Reinforce(),
        aggregation=Aggregation.TOKEN_MEAN,
        penalties=(LogRatioSquare(),),
    ),
    Recipe(
        name="vcpo",
        advantage=Opob(),
        weight=TargetBehaviourWeight(level=Level.SEQUENCE_PRODUCT, high=8.0),
        surrogate=Reinforce(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
        control=EssLearningRate(),
    ),
    Recipe(
        name="deepseek_v32",
        advantage=Grpo(),
        trust=(Opsm(),),
        surrogate=PpoClip(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        penalties=(Kl(importance=True),),
    ),
    Recipe(
        name="score_centering",
        advantage=DrGrpo(),
        surrogate=ScoreCentered(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="vtrace",
        advantage=VTrace(),
        surrogate=Reinforce(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="impala",
        advantage=VTrace(unit=StepUnit.TOKEN, values=ValueSource.CRITIC),
        surrogate=Reinforce(),
        aggregation=Aggregation.TOKEN_MEAN,
        critic=ValueCritic(clip=0.0),
        penalties=(Entropy(),),
    ),
    Recipe(
        name="none",
        advantage=Grpo(),
        surrogate=Reinforce(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
)
"""Decoupled PPO to V-trace, and no correction at all."""
