"""The queue's own records: its thresholds, and a group in each of its states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from actors.admission import LagBudget
from actors.group_filtering import account_of
from actors.trajectory.account import GroupAccount
from actors.trajectory.record import DropReason, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Thresholds. max_groups bounds granted and ready groups together; min_survivors is what a
    group needs to be trained; total_steps, the learner step at which
    the run ends, limits what is issued (None: endless); head_tokens is what the update needs of
    each sampled token; max_filtered_in_a_row as in `FilterAccount`."""

    run_id: str
    budget: LagBudget
    group_size: int
    max_groups: int
    max_bytes: int
    lease_s: float
    min_survivors: int = 2
    total_steps: int | None = None
    head_tokens: int = 0
    max_filtered_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What the queue needs to know of a validated payload.

    survivors, tokens: also of a group that the filter dropped. account: None without survivors.
    """

    group_id: str
    expected_size: int
    survivors: int
    tokens: int
    oldest_step: int
    failures: Mapping[DropReason, int] = field(default_factory=dict)
    failed_tokens: Mapping[DropReason, int] = field(default_factory=dict)
    head_bytes: int = 0
    account: GroupAccount | None = None
    filtered: bool = False

    @classmethod
    def of(cls, group: TrajectoryGroup) -> GroupSummary:
        """Summary of a decoded group."""
        account = account_of(group) if group.trajectories else group.filtered
        return cls(
            group_id=group.group_id,
            expected_size=group.expected_size,
            survivors=account.costs.trajectories if account else 0,
            tokens=account.costs.tokens if account else 0,
            oldest_step=group.version_span.oldest.step if group.trajectories else 0,
            failures=group.failures,
            failed_tokens=group.failed_tokens,
            head_bytes=group.head_bytes,
            account=account,
            filtered=group.filtered is not None,
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


def sizes(groups: Iterable[Ready]) -> tuple[int, int]:
    """Trajectories and tokens of some groups."""
    trajectories = tokens = 0
    for ready in groups:
        trajectories += ready.summary.survivors
        tokens += ready.summary.tokens
    return trajectories, tokens
