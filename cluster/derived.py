"""Numbers that follow from a configuration and are needed in more than one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from actors.admission import LagBudget, batches_left

if TYPE_CHECKING:
    from cluster.config import RunConfig

_BYTES_PER_TOKEN = 8
"""On the wire: a sampled token has an id and a logprob, four bytes each."""
_BYTES_PER_HEAD_TOKEN = 8
"""On the wire, as in `actors.trajectory.head`, which would load NumPy."""
_BYTES_PER_GROUP = 8 * 1024
"""On the wire: schema and description of a group."""


def lag_budget(config: RunConfig) -> LagBudget:
    """N, B and U of `actors.admission`."""
    return LagBudget(
        max_lag_versions=config.lag.max_lag_versions,
        groups_per_step=config.learner.groups_per_step,
        steps_per_batch=config.learner.max_reuse,
    )


def queue_groups(config: RunConfig) -> int:
    """Most groups that the lag bound can ever admit, by the rule of `actors.admission`."""
    budget = lag_budget(config)
    return budget.groups_per_step * batches_left(budget, 0, 0)


def group_bytes(config: RunConfig, head_tokens: int = 0) -> int:
    """About the most that one group can weigh on the wire, with heads of `head_tokens`."""
    rollout, context = config.rollout, config.engine.max_context_tokens
    sampled = min(context, rollout.max_turns * rollout.max_turn_tokens)
    trajectory = context * _BYTES_PER_TOKEN + sampled * head_tokens * _BYTES_PER_HEAD_TOKEN
    return rollout.group_size * trajectory + _BYTES_PER_GROUP


def needed_resources(config: RunConfig) -> Mapping[str, float]:
    """CPUs and GPUs that the run asks Ray for."""
    actors, learner = config.actors, config.learner
    return {
        "CPU": actors.count * actors.num_cpus + learner.ranks * learner.num_cpus,
        "GPU": actors.count * actors.num_gpus + learner.ranks * learner.num_gpus,
    }
