"""The trajectory queue as a Ray actor, with the surface of `ray.util.queue.Queue` and more.

The Ray actor is a thin shell around `QueueState`: it validates payloads, calls the state machine
and wakes the one consumer that may wait. Payloads cross process borders as bytes, by value: an
object reference would die with the rollout actor that owns it.

Contract
    consumes    task requests and payloads of rollout actors; leases and acks of the learner
    produces    grants, batches, statistics
    waits for   only `lease` waits, for at most its timeout, and only one consumer calls it
    woken by    an accepted put, a lost group, a resume
    invariants  those of `QueueState`; every client call may be repeated after a lost reply
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.queue import Empty, Full

from actors.task_queue import Grant, PutOutcome
from actors.trajectory.codec import decode_group
from actors.trajectory.record import DropReason, TrajectoryGroup
from cluster.observing.events import QueueStats
from cluster.trajectory_queue.records import GroupSummary, Lease, QueuePolicy
from cluster.trajectory_queue.state import QueueState
from correction.errors import RunError, TrajectoryError
from correction.versions import PolicyVersion

RETRIES = 5
"""How often a call is repeated while the queue's process cannot be reached."""


class QueueActor:
    """The Ray actor's class; async, so that a waiting lease blocks nobody."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._state = QueueState(policy, time.monotonic)
        self._changed = asyncio.Event()

    async def request_tasks(
        self, actor: str, version: PolicyVersion, want: int, request_id: str
    ) -> list[Grant]:
        """See `QueueState.grant`."""
        return self._state.grant(actor, version.step, want, request_id)

    async def put(self, group_id: str | None, payload: bytes) -> PutOutcome:
        """Validate and take in one encoded group. Raises TrajectoryError for invalid bytes."""
        try:
            group = decode_group(
                payload,
                run_id=self._state.policy.run_id,
                learner_version=self._state.version,
            )
            if group_id is not None and group.group_id != group_id:
                raise TrajectoryError("wrong_group", f"{group.group_id} put as {group_id}")
            if group.expected_size != self._state.policy.group_size:
                raise TrajectoryError("wrong_group", f"a group of {group.expected_size} members")
            _check_heads(group, self._state.policy.head_tokens)
        except TrajectoryError as error:
            self._state.reject(group_id or "", error.reason)
            self._changed.set()
            raise
        outcome = self._state.put(GroupSummary.of(group), payload)
        self._changed.set()
        return outcome

    async def lease(self, timeout_s: float) -> Lease | None:
        """The next batch, or None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (lease := self._state.lease()) is None:
            self._changed.clear()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            except TimeoutError:
                continue  # a lease or a group may have run out of time meanwhile
        return lease

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """One of the state machine's own methods, by name."""
        result = getattr(self._state, method)(*arguments)
        self._changed.set()
        return result


@dataclass(frozen=True)
class TrajectoryQueue:
    """Client of the queue; picklable. `*_async` and the TaskQueue calls are for Ray actors."""

    handle: Any
    timeout_s: float = 30.0

    @classmethod
    def start(cls, policy: QueuePolicy) -> TrajectoryQueue:
        """Start the Ray actor; it needs no CPU of its own, so it can always be placed."""
        remote = ray.remote(num_cpus=0, max_restarts=0)(QueueActor)
        return cls(remote.remote(policy))

    # --- rollout actors ----------------------------------------------------------------------

    async def request_tasks(self, actor: str, version: PolicyVersion, want: int) -> Sequence[Grant]:
        """See `TaskQueue`. Repeated under one id, so that no grant is lost with a reply."""
        call, request_id = self.handle.request_tasks.remote, uuid.uuid4().hex
        grants: Sequence[Grant] = await _retried(lambda: call(actor, version, want, request_id))
        return grants

    async def put_group(self, group_id: str, payload: bytes) -> PutOutcome:
        """Put an encoded group; repeated while the queue cannot be reached, which is safe."""
        outcome: PutOutcome = await _retried(lambda: self.handle.put.remote(group_id, payload))
        return outcome

    # --- learner and supervisor --------------------------------------------------------------

    def lease(self, timeout_s: float) -> Lease | None:
        """The next batch, or None after `timeout_s`."""
        lease: Lease | None = self._wait(self.handle.lease.remote(timeout_s), timeout_s)
        return lease

    def ack(self, lease_id: int, version: PolicyVersion, passes: int) -> bool:
        """See `QueueState.ack`."""
        return bool(self._call("ack", lease_id, version, passes))

    def nack(self, lease_id: int) -> None:
        """See `QueueState.nack`."""
        self._call("nack", lease_id)

    def learner_at(self, version: PolicyVersion) -> None:
        """See `QueueState.learner_at`."""
        self._call("learner_at", version)

    def actor_lost(self, actor: str) -> int:
        """See `QueueState.actor_lost`."""
        return int(self._call("actor_lost", actor))

    def lost(self, group_ids: Iterable[str], reason: DropReason) -> None:
        """See `QueueState.lost`."""
        self._call("lost", list(group_ids), reason)

    def lag_blocked(self, engine_step: int) -> bool:
        """See `QueueState.lag_blocked`."""
        return bool(self._call("lag_blocked", engine_step))

    def pause(self, why: str) -> None:
        """See `QueueState.pause`."""
        self._call("pause", why)

    def resume(self) -> None:
        """See `QueueState.resume`."""
        self._call("resume")

    def finish(self) -> None:
        """See `QueueState.finish`."""
        self._call("finish")

    def stats(self) -> QueueStats:
        """See `QueueState.stats`."""
        stats: QueueStats = self._call("stats")
        return stats

    # --- the surface of ray.util.queue.Queue -------------------------------------------------

    def qsize(self) -> int:
        """Groups that wait."""
        return self.stats().ready_groups

    def size(self) -> int:
        """As `qsize`."""
        return self.qsize()

    def empty(self) -> bool:
        """Whether no group waits."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Whether no rollout would be admitted now, even on the newest weights."""
        return self.stats().capacity_groups == 0

    def put(self, item: bytes, block: bool = True, timeout: float | None = None) -> None:
        """Put one encoded group. Raises ray.util.queue.Full as Ray's queue does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._wait(self.handle.put.remote(None, item), 0) is PutOutcome.FULL:
            if not block or (deadline is not None and time.monotonic() >= deadline):
                raise Full
            time.sleep(0.05)

    def put_nowait(self, item: bytes) -> None:
        """`put` that never waits."""
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> bytes:
        """One encoded group for good, counted as trained once. Raises ray.util.queue.Empty.

        The learner leases and acks instead, so that nothing is lost with it and lag is paced.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (taken := self._call("take", 1)):
            if not block or (deadline is not None and time.monotonic() >= deadline):
                raise Empty
            time.sleep(0.05)
        return bytes(taken[0])

    def get_nowait(self) -> bytes:
        """`get` that never waits."""
        return self.get(block=False)

    async def put_async(
        self, item: bytes, block: bool = True, timeout: float | None = None
    ) -> None:
        """`put` off the event loop."""
        await asyncio.to_thread(self.put, item, block, timeout)

    async def get_async(self, block: bool = True, timeout: float | None = None) -> bytes:
        """`get` off the event loop."""
        return await asyncio.to_thread(self.get, block, timeout)

    def put_nowait_batch(self, items: Iterable[bytes]) -> None:
        """`put_nowait` for each item."""
        for item in items:
            self.put_nowait(item)

    def get_nowait_batch(self, num_items: int) -> list[bytes]:
        """Exactly `num_items` groups, or Empty with nothing taken."""
        if self.qsize() < num_items:
            raise Empty
        return list(self._call("take", num_items))

    def shutdown(self, force: bool = False, grace_period_s: float = 5.0) -> None:
        """End the Ray actor; what is open is dropped by name first unless `force`."""
        if not force:
            self._call("finish")
        ray.kill(self.handle)

    # --- transport ---------------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        return self._wait(self.handle.call.remote(method, arguments), 0)

    def _wait(self, reference: Any, extra_s: float) -> Any:  # noqa: ANN401
        try:
            return ray.get(reference, timeout=self.timeout_s + extra_s)
        except GetTimeoutError as error:
            raise RunError(
                f"the trajectory queue gave no answer in {self.timeout_s:g} s"
            ) from error
        except RayActorError as error:
            raise RunError("the trajectory queue is lost: its process died") from error


def _check_heads(group: TrajectoryGroup, head_tokens: int) -> None:
    """The update can do neither without the heads that it needs nor with others."""
    for trajectory in group.trajectories:
        if trajectory.sampling.head_tokens != head_tokens:
            detail = f"heads of {trajectory.sampling.head_tokens} tokens, not {head_tokens}"
            raise TrajectoryError("wrong_head", detail)


async def _retried(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Repeat a call that is safe to repeat while the queue's process cannot be reached."""
    for attempt in range(RETRIES):
        try:
            return await call()
        except ActorUnavailableError:
            if attempt == RETRIES - 1:
                raise
            await asyncio.sleep(0.1 * 2**attempt)
    raise AssertionError("unreachable")
