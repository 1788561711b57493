"""What one rollout actor is told before it starts. Plain, frozen, cheap to ship."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.rollout import RolloutLimits
from actors.vllm_settings import VllmSettings
from correction.group_filter import GroupFilter


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings:
    """One rollout actor.

    groups_in_flight: groups that run at once; more of them hide tool time, and all of them
    count against the lag bound. group_filter: which finished groups are worth training on.
    """

    name: str
    run_id: str
    engine: VllmSettings
    environment: str
    environment_options: Mapping[str, object]
    temperature: float
    max_turn_tokens: int
    limits: RolloutLimits
    groups_in_flight: int
    group_filter: GroupFilter = GroupFilter.NONE
