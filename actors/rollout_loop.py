"""What a rollout actor does all day: ask for tasks, roll out groups, put them.

Contract
    consumes    grants of the task queue
    produces    encoded trajectory groups, one put a grant, whatever happened to its members; of
                a group that the group filter drops, its account
    waits for   a group to finish, a swap (`wake`), or `idle_poll_s`
    woken by    `wake` (after a swap more may be admitted), `stop`
    invariants  at most `groups_in_flight` groups run at once; a grant ends in exactly one put
                unless the engine dies, and then the loop ends with the first cause; a put that
                hears FULL is repeated, never parked at the queue; a group that the codec refuses
                is counted and harms no other
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors.engine import Engine
from actors.group_filtering import filtered
from actors.rollout_group import all_identical, without_survivors
from actors.task_queue import Grant, PutOutcome, TaskQueue
from actors.trajectory.codec import encode_group
from actors.trajectory.record import DropReason, TrajectoryGroup
from correction.errors import TrajectoryError
from correction.group_filter import GroupFilter

RollGroup = Callable[[Grant], Awaitable[TrajectoryGroup]]
"""Rolls out one granted group; failures of members are inside the group it returns."""


@dataclass(slots=True)
class LoopCounters:
    """What the loop has done since it started.

    identical_groups: groups whose members all sampled the same tokens (see `all_identical`).
    """

    groups: int = 0
    idle_s: float = 0.0
    tool_calls: int = 0
    environment_s: float = 0.0
    full_puts: int = 0
    identical_groups: int = 0


class RolloutLoop:
    """See the module docstring. `run` ends when `stop` was called and all groups are put."""

    def __init__(
        self,
        *,
        actor: str,
        engine: Engine,
        queue: TaskQueue,
        roll_group: RollGroup,
        groups_in_flight: int,
        group_filter: GroupFilter = GroupFilter.NONE,
        idle_poll_s: float = 0.02,
        full_retry_s: float = 0.1,
    ) -> None:
        self.actor = actor
        self.counters = LoopCounters()
        self._engine = engine
        self._queue = queue
        self._roll_group = roll_group
        self._groups_in_flight = groups_in_flight
        self._group_filter = group_filter
        self._idle_poll_s = idle_poll_s
        self._full_retry_s = full_retry_s
        self._running: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._stopping = False

    @property
    def running_groups(self) -> int:
        """Groups in flight."""
        return len(self._running)

    def wake(self) -> None:
        """Ask for tasks now: an engine just took newer weights."""
        self._wake.set()

    def stop(self) -> None:
        """Start nothing more; `run` returns when what runs is done."""
        self._stopping = True
        self.wake()

    async def run(self) -> None:
        """Run until stopped. Raises the first error that is not a member's own failure."""
        try:
            while not (self._stopping and not self._running):
                started = 0 if self._stopping else await self._fill()
                await self._pause(idle=not self._running and started == 0)
                self._reap()
        finally:
            await self._cancel_all()

    async def _fill(self) -> int:
        """Start as many groups as are granted."""
        want = self._groups_in_flight - len(self._running)
        if want <= 0:
            return 0
        grants = await self._queue.request_tasks(self.actor, self._engine.version, want)
        for grant in grants:
            self._running.add(asyncio.create_task(self._one(grant), name=grant.group_id))
        return len(grants)

    async def _pause(self, *, idle: bool) -> None:
        """Wait for a group to end, a wake, or the poll interval."""
        self._wake.clear()
        began = time.monotonic()
        waker = asyncio.create_task(self._wake.wait())
        await asyncio.wait(
            {waker, *self._running},
            timeout=self._idle_poll_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        waker.cancel()
        if idle:
            self.counters.idle_s += time.monotonic() - began

    def _reap(self) -> None:
        for task in [task for task in self._running if task.done()]:
            self._running.discard(task)
            task.result()

    async def _one(self, grant: Grant) -> None:
        group = await self._roll_group(grant)
        if DropReason.ENGINE_ERROR in group.failures:
            # A dead engine ends the loop: what is in flight is accounted as lost with the actor.
            self._engine.check_alive()
        self.counters.groups += 1
        self.counters.identical_groups += all_identical(group)
        for trajectory in group.trajectories:
            self.counters.tool_calls += trajectory.tool_calls
            self.counters.environment_s += trajectory.environment_s
        await self._put(grant.group_id, _encoded(filtered(group, self._group_filter)))

    async def _put(self, group_id: str, payload: bytes) -> None:
        """Until the queue has taken it, or has refused and counted it as invalid."""
        with contextlib.suppress(TrajectoryError):
            while await self._queue.put_group(group_id, payload) is PutOutcome.FULL:
                self.counters.full_puts += 1
                await asyncio.sleep(self._full_retry_s)

    async def _cancel_all(self) -> None:
        for task in self._running:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()


def _encoded(group: TrajectoryGroup) -> bytes:
    """The group on the wire; one that cannot be written travels as its failure, by name."""
    try:
        return encode_group(group)
    except TrajectoryError:
        return encode_group(without_survivors(group, DropReason.INVALID))
