"""`lagwise check`: the rules applied, and what the configuration comes to, in words and numbers."""

from __future__ import annotations

from cluster import assembly
from cluster.checks import check_config
from cluster.config import RunConfig
from cluster.derived import group_bytes, lag_budget, needed_resources, queue_groups
from correction.needs import Need
from correction.recipes import describe


def describe_plan(config: RunConfig) -> str:
    """The plan as text. Raises ConfigError with every problem."""
    check_config(config)
    sections = (
        _pipeline(config),
        _broadcast(config),
        *_heads(config),
        _resources(config),
        describe(assembly.recipe(config)),
        *_idle_tables(config),
    )
    return "\n\n".join(sections)


def _pipeline(config: RunConfig) -> str:
    budget = lag_budget(config)
    groups = queue_groups(config)
    size = config.rollout.group_size
    return "\n".join(
        [
            f"lag bound    {budget.max_lag_versions} versions on the last of "
            f"{budget.steps_per_batch} passes: at most {groups} groups "
            f"({groups * size} trajectories) in flight and waiting",
            f"step         {budget.groups_per_step} groups of {size}: "
            f"{budget.groups_per_step * size} trajectories",
            f"length       {config.run.max_steps} optimiser steps",
        ]
    )


def _broadcast(config: RunConfig) -> str:
    schedule = assembly.broadcast_schedule(config)
    every = f"every {schedule.every_versions} versions"
    if schedule.kind == "adaptive":
        every = f"adaptive, 1 to {schedule.most_versions} versions"
    return f"broadcast    {every}; an engine has {config.broadcast.engine_deadline_s:g} s"


def _heads(config: RunConfig) -> tuple[str, ...]:
    """What the heads weigh, where the recipe needs some."""
    head_tokens = assembly.recipe(config).head_tokens
    if head_tokens == 0:
        return ()
    with_heads, without = group_bytes(config, head_tokens), group_bytes(config)
    return (
        f"heads        {head_tokens} likeliest tokens at each sampled place: a group weighs up to "
        f"{with_heads / 2**20:.3g} MiB, {without / 2**20:.2g} MiB without",
    )


def _idle_tables(config: RunConfig) -> tuple[str, ...]:
    """Tables that were filled in, though this recipe does not look at them."""
    needs, defaults = assembly.recipe(config).needs, RunConfig()
    idle = [
        f"[{table}] is not looked at: the recipe needs no {need}"
        for table, need in (
            ("critic", Need.VALUES),
            ("reference", Need.REFERENCE),
            ("pretraining", Need.PRETRAINING),
        )
        if need not in needs and getattr(config, table) != getattr(defaults, table)
    ]
    return ("\n".join(idle),) if idle else ()


def _resources(config: RunConfig) -> str:
    needed = needed_resources(config)
    return (
        f"asks for     {needed['CPU']:g} CPUs, {needed['GPU']:g} GPUs: "
        f"{config.actors.count} rollout actors, {config.learner.ranks} learner ranks"
    )
