"""The parts a recipe is made of, by slot and by name: what a config names and may override.

    slot         kinds
    advantage    return, rloo, grpo, dr_grpo
    proximal     recompute, behaviour
    weight       none, proximal_behaviour, target_behaviour
    surrogate    ppo_clip, gspo, reinforce
    aggregation  token_mean, sequence_mean_token_mean, ...

A new method is a pure function in its module and a part, named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import TypeAlias

from correction.advantage_parts import DrGrpo, Grpo, Return, Rloo
from correction.aggregation import Aggregation
from correction.bounds import BOUND_PARAMETERS
from correction.proximal import Proximal
from correction.surrogate_parts import Gspo, PpoClip, Reinforce
from correction.weight_parts import NoWeight, ProximalBehaviourWeight, TargetBehaviourWeight

Advantage: TypeAlias = Return | Rloo | Grpo | DrGrpo
Weight: TypeAlias = NoWeight | ProximalBehaviourWeight | TargetBehaviourWeight
Surrogate: TypeAlias = PpoClip | Gspo | Reinforce
Part: TypeAlias = Advantage | Proximal | Weight | Surrogate | Aggregation


def _by_kind(*parts: Advantage | Weight | Surrogate) -> dict[str, Part]:
    return {part.kind: part for part in parts}


PARTS: Mapping[str, Mapping[str, Part]] = {
    "advantage": _by_kind(Return(), Rloo(), Grpo(), DrGrpo()),
    "proximal": {part.value: part for part in Proximal},
    "weight": _by_kind(NoWeight(), ProximalBehaviourWeight(), TargetBehaviourWeight()),
    "surrogate": _by_kind(PpoClip(), Gspo(), Reinforce()),
    "aggregation": {part.value: part for part in Aggregation},
}
"""Every slot's kinds, by name, with their default parameters."""


def kind_of(part: Part) -> str:
    """The name of a part in its slot."""
    return part.value if isinstance(part, StrEnum) else part.kind


def parameters_of(part: Part) -> dict[str, object]:
    """The parameters of a part that have an effect, with their values."""
    if isinstance(part, StrEnum):
        return {}
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    if isinstance(part, ProximalBehaviourWeight):
        for idle in {"low", "high"} - BOUND_PARAMETERS[part.bound]:
            del values[idle]
    return values
