"""Events made by hand for tests: every field has a plain default."""

from __future__ import annotations

from collections.abc import Mapping

from actors.trajectory.account import GroupCosts
from cluster.observing.events import (
    ActorStats,
    BroadcastEvent,
    EvaluationEvent,
    LedgerCounts,
    QueueStats,
    StepEvent,
)
from correction.versions import PolicyVersion


def make_step(
    number: int,
    *,
    applied: bool = True,
    reuse_pass: int = 1,
    passes: int = 1,
    at_s: float | None = None,
    step_s: float = 1.0,
    wait_s: float = 1.0,
    reward: float = 0.5,
    reward_parts: Mapping[str, float] | None = None,
    gradient_norm: float = 0.7,
    trajectories: int = 4,
    action_tokens: int = 40,
    lag_trajectories: Mapping[int, int] | None = None,
    lag_tokens: Mapping[int, int] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> StepEvent:
    return StepEvent(
        version=PolicyVersion(0, number),
        applied=applied,
        reuse_pass=reuse_pass,
        passes=passes,
        at_s=2.0 * number if at_s is None else at_s,
        step_s=step_s,
        wait_s=wait_s,
        reward_mean=reward,
        reward_parts=reward_parts or {},
        loss=0.1,
        gradient_norm=gradient_norm,
        learning_rate=1e-5,
        action_tokens=action_tokens,
        trajectories=trajectories,
        lag_trajectories={0: trajectories} if lag_trajectories is None else lag_trajectories,
        lag_tokens={0: action_tokens} if lag_tokens is None else lag_tokens,
        metrics=metrics or {},
        phases_s={"score": 0.2, "forward_backward": 0.8},
        padding_ratio=0.25,
    )


def make_broadcast(
    engine: str = "actor-0",
    *,
    version: int = 1,
    outcome: str = "swapped",
    phases_s: Mapping[str, float] | None = None,
    stall_s: float = 0.0,
    mismatch: float = 0.0,
    size_bytes: int = 0,
) -> BroadcastEvent:
    return BroadcastEvent(
        engine,
        PolicyVersion(0, version),
        outcome,
        phases_s or {},
        stall_s,
        mismatch,
        size_bytes,
    )


def make_ledger(
    trained: int = 0,
    dropped: Mapping[str, int] | None = None,
    queued: int = 0,
    leased: int = 0,
    in_flight: int = 0,
) -> LedgerCounts:
    dropped = dropped or {}
    issued = trained + sum(dropped.values()) + queued + leased + in_flight
    return LedgerCounts(issued, trained, dropped, queued, leased, in_flight)


def make_queue(
    trajectories: LedgerCounts | None = None,
    tokens: LedgerCounts | None = None,
    *,
    ready_groups: int = 5,
    in_flight_groups: int = 12,
    refused: Mapping[str, int] | None = None,
    rejected: Mapping[str, int] | None = None,
    received_bytes: int = 40_000,
    head_bytes: int = 30_000,
    kept: Mapping[str, GroupCosts] | None = None,
    filtered: Mapping[str, GroupCosts] | None = None,
) -> QueueStats:
    return QueueStats(
        trajectories=trajectories or make_ledger(),
        tokens=tokens or make_ledger(),
        ready_groups=ready_groups,
        in_flight_groups=in_flight_groups,
        leased_groups=2,
        queued_bytes=12_345,
        oldest_age_s=1.5,
        capacity_groups=3,
        refused=refused or {},
        duplicates=1,
        rejected=rejected or {},
        received_bytes=received_bytes,
        head_bytes=head_bytes,
        kept=kept or {},
        filtered=filtered or {},
    )


def make_actor(
    name: str = "actor-0",
    *,
    state: str = "running",
    version: int | None = 1,
    generated_tokens: int = 0,
    idle_s: float = 0.0,
    alive_s: float = 10.0,
    tool_calls: int = 0,
    environment_s: float = 0.0,
    restarts: int = 0,
    full_puts: int = 0,
    identical_groups: int = 0,
) -> ActorStats:
    return ActorStats(
        actor=name,
        state=state,
        version=None if version is None else PolicyVersion(0, version),
        running_groups=2,
        running_requests=8,
        generated_tokens=generated_tokens,
        idle_s=idle_s,
        alive_s=alive_s,
        tool_calls=tool_calls,
        environment_s=environment_s,
        restarts=restarts,
        full_puts=full_puts,
        identical_groups=identical_groups,
    )


def make_evaluation(number: int = 10, success: float = 0.75) -> EvaluationEvent:
    return EvaluationEvent(
        version=PolicyVersion(0, number),
        tasks=64,
        success=success,
        low=success - 0.1,
        high=success + 0.1,
        temperature=1.0,
        seconds=3.5,
    )
