"""The siblings of one task: played at once, accounted together.

Contract
    consumes    a task
    produces    a trajectory group: survivors, and failures by name
    waits for   its episodes, each under its own deadline
    woken by    them
    invariants  every member is a survivor or a failure with a reason, never both, never neither
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.environment import Task
from actors.rollout import RolloutFailure, RolloutSetting, rollout
from actors.trajectory.record import DropReason, Trajectory, TrajectoryGroup

OnFailure = Callable[[RolloutFailure], None]
"""Hears of every failure, with the detail that does not travel on the wire."""


async def rollout_group(
    task: Task,
    setting: RolloutSetting,
    *,
    run_id: str,
    group_id: str,
    group_size: int,
    on_failure: OnFailure = lambda failure: None,
) -> TrajectoryGroup:
    """Play all siblings of a task at once; survivors and failures, accounted.

    When cancelled, or when one member meets an error that is nobody's failure but ours, all are
    cancelled and have closed their environments before this ends.
    """
    members = [
        asyncio.create_task(rollout(task, setting, group_id=group_id, member=member))
        for member in range(group_size)
    ]
    try:
        outcomes = await asyncio.gather(*members)
    finally:
        for running in members:
            running.cancel()
        await asyncio.gather(*members, return_exceptions=True)
    return account_group(task, outcomes, run_id=run_id, group_id=group_id, on_failure=on_failure)


def account_group(
    task: Task,
    outcomes: Sequence[Trajectory | RolloutFailure],
    *,
    run_id: str,
    group_id: str,
    on_failure: OnFailure = lambda failure: None,
) -> TrajectoryGroup:
    """The group that these outcomes of all its members make."""
    failures: Counter[DropReason] = Counter()
    failed_tokens: Counter[DropReason] = Counter()
    for outcome in outcomes:
        if isinstance(outcome, RolloutFailure):
            on_failure(outcome)
            failures[outcome.reason] += 1
            failed_tokens[outcome.reason] += outcome.sampled_tokens
    return TrajectoryGroup(
        run_id=run_id,
        group_id=group_id,
        environment=task.environment,
        task_id=task.task_id,
        expected_size=len(outcomes),
        trajectories=tuple(o for o in outcomes if isinstance(o, Trajectory)),
        failures=dict(failures),
        failed_tokens=dict(failed_tokens),
    )


def without_survivors(group: TrajectoryGroup, reason: DropReason) -> TrajectoryGroup:
    """The same group with its survivors counted as failures."""
    failures = Counter({**group.failures})
    failed_tokens = Counter({**group.failed_tokens})
    failures[reason] += len(group.trajectories)
    failed_tokens[reason] += group.action_tokens
    return replace(
        group, trajectories=(), failures=dict(failures), failed_tokens=dict(failed_tokens)
    )


def all_identical(group: TrajectoryGroup) -> bool:
    """Whether two or more survivors sampled exactly the same tokens in every turn.

    Normal for a policy that is sure; as a rule, at temperature > 0, it says that the engine's
    random numbers are shared or fixed. Worth a counter.
    """
    actions = {
        tuple(turn.action_ids.tobytes() for turn in trajectory.turns)
        for trajectory in group.trajectories
    }
    return len(group.trajectories) > 1 and len(actions) == 1
