"""The queue's own records: its thresholds, and a group in each of its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.admission import LagBudget
from actors.trajectory.record import DropReason, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Thresholds. max_groups bounds granted and ready groups together; min_survivors is what a
    group needs to be trained; total_steps, the learner step at which
    the run ends, limits what is issued (None: endless); head_tokens is what the update needs of
    each sampled token."""

    run_id: str
    budget: LagBudget
    group_size: int
    max_groups: int
    max_bytes: int
    lease_s: float
    min_survivors: int = 2
    total_steps: int | None = None
    head_tokens: int = 0


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
    head_bytes: int = 0

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
            head_bytes=group.head_bytes,
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch in the hands of a consumer until acked, nacked or expired."""

    lease_id: int
    payloads: tuple[bytes, ...]
    group_ids: tuple[str, ...]


@dataclass(slots=True)
class InFlight:
    """A granted group. oldest_step: of the engine that it was granted to."""

    actor: str
    members: int
    oldest_step: int


@dataclass(slots=True)
class Ready:
    """A group that waits."""

    summary: GroupSummary
    payload: bytes
    arrived_s: float


@dataclass(slots=True)
class Leased:
    """The groups of a lease, and when it runs out."""

    groups: list[Ready]
    deadline_s: float
