"""What a rollout actor asks of the trajectory queue: tasks to start, and a place for results.

The queue implements it (over Ray: cluster/trajectory_queue/ray_queue.py).
Neither call ever parks: an actor that gets no grant or hears FULL asks again later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from correction.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to roll out one group: `task_index` is its place in the training sequence."""

    group_id: str
    task_index: int
    group_size: int


class PutOutcome(StrEnum):
    """What became of a put. Only FULL asks the producer to try again."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    DROPPED = "dropped"
    FULL = "full"


class TaskQueue(Protocol):
    """The two calls."""

    async def request_tasks(self, actor: str, version: PolicyVersion, want: int) -> Sequence[Grant]:
        """Up to `want` grants for an engine at `version`; none where the pipeline is full."""
        ...

    async def put_group(self, group_id: str, payload: bytes) -> PutOutcome:
        """Hand over an encoded trajectory group. Safe to repeat."""
        ...
