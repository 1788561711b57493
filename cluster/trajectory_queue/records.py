"""The queue's own records: its thresholds, what it knows of a group, and a leased batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.admission import LagBudget
from actors.trajectory.record import DropReason, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Thresholds. max_groups bounds granted and ready groups together; min_survivors is what a
    group needs to be trained; total_batches limits what is issued (None: endless)."""

    run_id: str
    budget: LagBudget
    group_size: int
    max_groups: int
    max_bytes: int
    lease_s: float
    min_survivors: int = 2
    total_batches: int | None = None


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What the queue needs to know of a validated payload."""

    group_id: str
    expected_size: int
    survivors: int
    tokens: int
    oldest_step: int
    failures: Mapping[DropReason, int] = field(default_factory=dict)
    failed_tokens: Mapping[DropReason, int] = field(default_factory=dict)

    @classmethod
    def of(cls, group: TrajectoryGroup) -> GroupSummary:
        """Summary of a decoded group."""
        return cls(
            group_id=group.group_id,
            expected_size=group.expected_size,
            survivors=len(group.trajectories),
            tokens=group.action_tokens,
            oldest_step=group.version_span.oldest.step if group.trajectories else 0,
            failures=group.failures,
            failed_tokens=group.failed_tokens,
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch in the hands of a consumer until acked, nacked or expired."""

    lease_id: int
    payloads: tuple[bytes, ...]
    group_ids: tuple[str, ...]
