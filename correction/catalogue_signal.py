"""Named methods whose idea is the update signal or the objective. Papers: docs/methods.md."""

from __future__ import annotations

from correction.advantage_parts import Baseline, DrGrpo, Grpo, MaxRl, Reco, Return, Rloo, Tail
from correction.aggregation import Aggregation
from correction.composition import Recipe
from correction.group_filter import GroupFilter
from correction.learner_parts import ValueCritic
from correction.penalties import KlEstimator
from correction.penalty_parts import Kl, KlPlace, Pretraining, PromptKl
from correction.ratios import Level
from correction.shaping_parts import OverlongPenalty
from correction.surrogate_parts import CrossEntropy, PpoClip, RecoClip, Reinforce
from correction.token_advantage_parts import (
    Gae,
    ReinforcePp,
    ReinforcePpBaseline,
    SharedPrefix,
    Teacher,
)
from correction.weight_parts import TargetBehaviourWeight

SIGNAL_RECIPES = (
    Recipe(
        name="reinforce",
        advantage=Return(),
        surrogate=Reinforce(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
    ),
    Recipe(
        name="reinforce_baseline",
        advantage=Baseline(),
        surrogate=Reinforce(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
    ),
    Recipe(
        name="rloo",
        advantage=Rloo(),
        weight=TargetBehaviourWeight(level=Level.SEQUENCE_PRODUCT),
        surrogate=Reinforce(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
    ),
    Recipe(
        name="reinforce_pp",
        advantage=ReinforcePp(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
        penalties=(Kl(coefficient=0.01, place=KlPlace.REWARD),),
    ),
    Recipe(
        name="reinforce_pp_baseline",
        advantage=ReinforcePpBaseline(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
        penalties=(Kl(coefficient=0.01, estimator=KlEstimator.K2),),
    ),
    Recipe(
        name="grpo",
        advantage=Grpo(),
        surrogate=PpoClip(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        penalties=(Kl(),),
    ),
    Recipe(
        name="dr_grpo",
        advantage=DrGrpo(),
        surrogate=PpoClip(),
        aggregation=Aggregation.CONSTANT,
    ),
    Recipe(
        name="dapo",
        advantage=Grpo(),
        surrogate=PpoClip(clip_high=0.28),
        aggregation=Aggregation.TOKEN_MEAN,
        shaping=(OverlongPenalty(),),
        group_filter=GroupFilter.MIXED_REWARDS,
    ),
    Recipe(
        name="ppo",
        advantage=Gae(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
        critic=ValueCritic(),
    ),
    Recipe(
        name="instructgpt",
        advantage=Gae(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
        critic=ValueCritic(),
        penalties=(
            Kl(coefficient=0.02, place=KlPlace.REWARD),
            Pretraining(),
        ),
    ),
    Recipe(
        name="tail_rl",
        advantage=Tail(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="maxrl",
        advantage=MaxRl(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="reco",
        advantage=Reco(),
        surrogate=RecoClip(),
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    ),
    Recipe(
        name="erpo",
        advantage=Grpo(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
        penalties=(PromptKl(),),
    ),
    Recipe(
        name="srpo",
        advantage=Teacher(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="arpo",
        advantage=SharedPrefix(),
        surrogate=PpoClip(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
    Recipe(
        name="dagger",
        advantage=Return(),
        surrogate=CrossEntropy(),
        aggregation=Aggregation.TOKEN_MEAN,
    ),
)
"""REINFORCE to ERPO."""
