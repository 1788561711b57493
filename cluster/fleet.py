"""The rollout actors of a run: started, fed with weights, watched, replaced, stopped.

Contract
    consumes    published versions (offer), task and result traffic goes past it
    produces    actor statistics, broadcast events; names of lost actors to the queue
    waits for   each actor's answer by itself, with a deadline
    woken by    a swap that succeeded (the actor may act), one that failed, a missed answer
    invariants  an actor acts only on proven weights of this run; a dead one is replaced until its
                restart budget is used up, and then the fleet fails with the first cause; what a
                dead actor had in flight is accounted before its successor starts

Runs on one asyncio loop, in a thread of its own (`FleetThread`), so that a learner that computes
never holds up a broadcast.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from actors.pool import ActorSample
from actors.weights import SwapReport, SwapRequest
from cluster.broadcast import Broadcaster, Published, Staging
from cluster.observing.events import ActorStats, BroadcastEvent
from correction.errors import EngineError, LagwiseError, RunError, SwapRefused

SETTLE_POLL_S = 0.05


class LaunchActor(Protocol):
    """Creates the Ray actor of one replica; `incarnation` counts its restarts."""

    def __call__(self, name: str, incarnation: int) -> Any:  # noqa: ANN401
        """A handle of `actors.pool.RolloutActor`."""
        ...


def actor_identity(name: str, incarnation: int) -> str:
    """Name of one incarnation of a rollout actor."""
    return f"{name}.{incarnation}"


@dataclass(slots=True)
class _Replica:
    name: str
    handle: Any
    node: str
    restarts: int
    began: bool = False
    state: str = "starting"

    @property
    def identity(self) -> str:
        """What the queue knows it by: a successor is somebody else."""
        return actor_identity(self.name, self.restarts)

    async def swap(self, request: SwapRequest) -> SwapReport:
        before, self.state = self.state, "swapping"
        try:
            report: SwapReport = await self.handle.swap.remote(request)
        except SwapRefused:  # nothing was touched
            self.state = before
            raise
        self.state = "running"
        return report


@dataclass(frozen=True, slots=True)
class FleetPolicy:
    """Deadlines in seconds and the restart budget of each replica.

    swap_deadline_s: pause, load and resume of one swap, kept by the engine itself.
    engine_deadline_s: a whole broadcast to one engine, after which it is given up.
    """

    replicas: int
    start_deadline_s: float
    swap_deadline_s: float
    engine_deadline_s: float
    answer_deadline_s: float
    max_restarts: int


class Fleet:
    """See the module docstring."""

    def __init__(
        self,
        policy: FleetPolicy,
        *,
        launch: LaunchActor,
        queue: Any,  # noqa: ANN401  (a TrajectoryQueue; actors get it to talk to)
        staging: Staging,
        on_broadcast: Callable[[BroadcastEvent], None],
        on_message: Callable[[str, str], None],
    ) -> None:
        self._policy = policy
        self._launch = launch
        self._queue = queue
        self._on_message = on_message
        self._on_broadcast = on_broadcast
        self._replicas: dict[str, _Replica] = {}
        self._background: set[asyncio.Future[None]] = set()
        self._stalls_s: dict[str, float] = {}
        self._stopping = False
        self.failure: BaseException | None = None
        self.first_failures: dict[str, str] = {}
        """The first failed episode for each reason, in words."""
        self.broadcaster = Broadcaster(
            staging,
            deadline_s=policy.engine_deadline_s,
            swap_deadline_s=policy.swap_deadline_s,
            on_event=self._told,
            on_failure=self._swap_failed,
            on_swapped=self._swapped,
        )

    async def start(self) -> None:
        """Start all replicas; raises the first failure."""
        names = [f"actor-{number}" for number in range(self._policy.replicas)]
        await asyncio.gather(*(self._start_replica(name, restarts=0) for name in names))

    async def poll(self) -> Mapping[str, ActorStats]:
        """Statistics of every replica that answers; one that does not is replaced."""
        replicas = list(self._replicas.values())
        answers = await asyncio.gather(*(self._poll_one(replica) for replica in replicas))
        return {stats.actor: stats for stats in answers if stats is not None}

    async def evaluate(self, indices: Sequence[int], temperature: float) -> list[float | None]:
        """Rewards of held-out tasks, spread over the replicas, in the order of `indices`.

        None for an episode that failed. What a replica did not finish because it died goes to
        those that live, or to its successor. Raises the fleet's failure.
        """
        rewards: dict[int, float | None] = {}
        while missing := [index for index in indices if index not in rewards]:
            await self.settle()
            replicas = [r for r in self._replicas.values() if r.state == "running"]
            shares = [missing[n :: len(replicas)] for n in range(len(replicas))]
            answers = await asyncio.gather(
                *(
                    self._evaluate_on(replica, share, temperature)
                    for replica, share in zip(replicas, shares, strict=True)
                )
            )
            for answer in answers:
                rewards |= answer
        return [rewards[index] for index in indices]

    async def settle(self) -> None:
        """Wait until every engine, replacements included, serves the latest version.

        Raises the fleet's failure. Every step on the way has a deadline and the restarts a budget.
        """
        while self.failure is None and self.broadcaster.latest is not None:
            await self.broadcaster.settle()
            if all(replica.state == "running" for replica in self._replicas.values()):
                return
            await asyncio.sleep(SETTLE_POLL_S)
        if self.failure is not None:
            raise self.failure

    async def stop(self, grace_s: float = 15.0) -> None:
        """End every replica and release what it holds."""
        self._stopping = True
        await self.broadcaster.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        living = [replica for replica in self._replicas.values() if replica.state != "dead"]
        await asyncio.gather(*(self._end(replica, grace_s) for replica in living))
        self._replicas.clear()

    def mean_stall_s(self) -> float:
        """Last measured stall of a swap, averaged over replicas."""
        return sum(self._stalls_s.values()) / len(self._stalls_s) if self._stalls_s else 0.0

    # --- one replica ---------------------------------------------------------------------------

    async def _start_replica(self, name: str, restarts: int) -> None:
        handle = self._launch(name, restarts)
        replica = _Replica(name, handle, "", restarts)
        self._replicas[name] = replica
        deadline_s = self._policy.start_deadline_s
        try:
            await asyncio.wait_for(_plain(handle.start.remote()), deadline_s)
            replica.node = await _plain(handle.__ray_call__.remote(_node_of))
        except TimeoutError as error:
            raise RunError(f"{name} did not start within {deadline_s:.0f} s") from error
        self.broadcaster.add(replica)

    def _swapped(self, name: str) -> None:
        replica = self._replicas.get(name)
        if replica is not None and not replica.began:
            replica.began = True
            self._in_background(self._begin(replica))

    def _swap_failed(self, name: str, cause: BaseException) -> None:
        self._in_background(self._replace(self._replicas[name], cause))

    async def _begin(self, replica: _Replica) -> None:
        try:
            await _plain(replica.handle.begin.remote(self._queue))
        except (RayError, LagwiseError) as error:
            await self._replace(replica, error)

    async def _evaluate_on(
        self, replica: _Replica, share: Sequence[int], temperature: float
    ) -> dict[int, float | None]:
        """Rewards by index; none from a replica that dies, which is then replaced."""
        try:
            answer = await _plain(replica.handle.evaluate.remote(list(share), temperature))
        except (RayError, LagwiseError) as error:
            await self._replace(replica, error)
            return {}
        return dict(zip(share, answer, strict=True))

    async def _poll_one(self, replica: _Replica) -> ActorStats | None:
        if not replica.node or replica.state == "dead":
            return None
        try:
            sample: ActorSample = await asyncio.wait_for(
                _plain(replica.handle.sample.remote()), self._policy.answer_deadline_s
            )
        except TimeoutError:
            late = EngineError(f"no answer within {self._policy.answer_deadline_s:g} s")
            self._suspect(replica, late)
            return None
        except (RayError, LagwiseError) as error:
            self._suspect(replica, error)
            return None
        self._remember(replica.name, sample.first_failures)
        return ActorStats(
            actor=replica.name,
            state=replica.state,
            version=sample.version,
            running_groups=sample.running_groups,
            running_requests=sample.running_requests,
            generated_tokens=sample.generated_tokens,
            idle_s=sample.idle_s,
            alive_s=sample.alive_s,
            tool_calls=sample.tool_calls,
            environment_s=sample.environment_s,
            restarts=replica.restarts,
            full_puts=sample.full_puts,
            identical_groups=sample.identical_groups,
        )

    def _suspect(self, replica: _Replica, cause: BaseException) -> None:
        if replica.state not in ("swapping", "dead"):  # a swap has its own deadline
            self._in_background(self._replace(replica, cause))

    async def _replace(self, replica: _Replica, cause: BaseException) -> None:
        """Account for a dead replica, then start its successor if the budget allows."""
        if replica.state == "dead" or self._stopping:
            return
        name, replica.state = replica.name, "dead"
        self.broadcaster.remove(name)
        ray.kill(replica.handle)
        lost = await asyncio.to_thread(self._queue.actor_lost, replica.identity)
        self._on_message("warning", f"{name} is lost with {lost} groups in flight: {brief(cause)}")
        if replica.restarts >= self._policy.max_restarts:
            self._fail(name, replica.restarts, cause)
            return
        try:
            await self._start_replica(name, replica.restarts + 1)
        except (RayError, LagwiseError) as error:
            self._in_background(self._replace(self._replicas[name], error))

    def _fail(self, name: str, restarts: int, cause: BaseException) -> None:
        if self.failure is None:
            self.failure = RunError(f"{name} failed after {restarts} restarts: {brief(cause)}")
            self.failure.__cause__ = cause

    async def _end(self, replica: _Replica, grace_s: float) -> None:
        try:
            await asyncio.wait_for(_plain(replica.handle.stop.remote()), grace_s)
        except (RayError, LagwiseError, TimeoutError) as error:
            self._on_message("warning", f"{replica.name} did not stop in order: {brief(error)}")
        finally:
            ray.kill(replica.handle)

    # --- bookkeeping -----------------------------------------------------------------------------

    def _told(self, event: BroadcastEvent) -> None:
        if event.outcome == "swapped" and event.stall_s > 0:
            self._stalls_s[event.engine] = event.stall_s
        self._on_broadcast(event)

    def _remember(self, name: str, first_failures: Mapping[str, str]) -> None:
        for reason in first_failures.keys() - self.first_failures.keys():
            self.first_failures[reason] = first_failures[reason]
            self._on_message("warning", f"first {reason} ({name}): {first_failures[reason]}")

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Future[None]) -> None:
        """What nobody foresaw must not leave a replica behind that nobody looks after."""
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_message("error", brief(error))
            self.failure = self.failure or error


class FleetThread:
    """The fleet's loop in a thread, and the learner loop's `Broadcast` towards it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fleet: Fleet) -> None:
        self._loop = loop
        self._fleet = fleet

    @property
    def in_progress(self) -> bool:
        """See `learner.loop.Broadcast`."""
        return self._fleet.broadcaster.in_progress

    def offer(self, published: Published) -> None:
        """See `learner.loop.Broadcast`."""
        self._loop.call_soon_threadsafe(self._fleet.broadcaster.offer, published)

    def mean_stall_s(self) -> float:
        """See `learner.loop.Broadcast`."""
        return self._fleet.mean_stall_s()


def brief(error: BaseException) -> str:
    """The first cause in one line, without Ray's remote stack trace."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException) and cause is not error:
        return brief(cause)
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _node_of(actor: object) -> str:
    """Id of the node that a Ray actor runs on; called inside it."""
    return str(ray.get_runtime_context().get_node_id())


async def _plain(reference: Any) -> Any:  # noqa: ANN401
    """Await an object reference as a coroutine, so that asyncio can cancel and time it."""
    return await reference
