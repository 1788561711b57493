"""The fleet over real Ray actors of a small class: begin after proof, replace, budget, stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.pool import ActorSample
from actors.weights import Canary, SwapReport, SwapRequest, WeightManifest
from cluster.broadcast import Published
from cluster.fleet import Fleet, FleetPolicy
from cluster.observing.events import BroadcastEvent
from cluster.ray_session import ray_session
from correction.errors import SwapError, SwapRefused
from correction.versions import PolicyVersion

pytestmark = pytest.mark.stack
POLICY = FleetPolicy(
    replicas=2,
    start_deadline_s=30,
    swap_deadline_s=5,
    engine_deadline_s=5,
    answer_deadline_s=5,
    max_restarts=1,
)


class StandIn:
    """Has the calls of a rollout actor; `fate` says what goes wrong with it."""

    def __init__(self, name: str, incarnation: int, fate: str) -> None:
        self._name = name
        self._fate = fate if incarnation == 0 or fate.endswith("always") else "well"
        self._version = PolicyVersion(0, 0)
        self._begun = False

    async def start(self) -> None:
        if self._fate == "start":
            os.kill(os.getpid(), signal.SIGKILL)

    async def begin(self, queue: Any) -> None:  # noqa: ANN401
        self._begun = True

    async def swap(self, request: SwapRequest) -> SwapReport:
        if self._fate == "refuse":
            self._fate = "well"
            raise SwapRefused("no_room", "scripted")
        if self._fate.startswith("swap"):
            raise SwapError("the canary did not agree")
        self._version = request.manifest.version
        return SwapReport(self._version, {"load": 0.01}, stall_s=0.02)

    async def sample(self) -> ActorSample:
        if self._fate == "hang":
            await asyncio.sleep(60)
        failures = {"environment_error": "OSError: no network"}
        begun = int(self._begun)
        return ActorSample(self._version, begun, 0, 0, 0.0, 1.0, 0, 0.0, failures, 4, 3)

    async def evaluate(self, indices: list[int], temperature: float) -> list[float | None]:
        if self._fate == "evaluate":
            os.kill(os.getpid(), signal.SIGKILL)
        return [float(index) for index in indices]

    async def stop(self) -> None:
        self._begun = False


class Queue:
    """Remembers which actors were reported lost."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def actor_lost(self, name: str) -> int:
        self.lost.append(name)
        return 3

    def __reduce__(self) -> Any:  # noqa: ANN401
        return Queue, ()


class Rig:
    """A fleet of stand-ins with everything that it told."""

    def __init__(self, policy: FleetPolicy = POLICY, **fates: str) -> None:
        remote = ray.remote(num_cpus=0)(StandIn)
        self.queue = Queue()
        self.events: list[BroadcastEvent] = []
        self.messages: list[str] = []

        def launch(name: str, incarnation: int) -> Any:  # noqa: ANN401
            return remote.remote(name, incarnation, fates.get(name.replace("-", "_"), "well"))

        self.fleet = Fleet(
            policy,
            launch=launch,
            queue=self.queue,
            staging=self,
            on_broadcast=self.events.append,
            on_message=lambda level, text: self.messages.append(text),
        )

    async def stage(self, node: str, published: Published) -> str:
        return "segment-1-1"


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with ray_session(num_cpus=2):
        yield


def published(step: int) -> Published:
    manifest = WeightManifest("r", PolicyVersion(0, step), (), (8,), ("00",), Canary((), (), 0.0))
    return Published(manifest, ())


async def until(condition: Any, rig: Rig) -> None:  # noqa: ANN401
    async with asyncio.timeout(60):
        while not condition():
            await rig.fleet.poll()
            await asyncio.sleep(0.05)


def test_actors_begin_after_their_first_proven_swap() -> None:
    async def scenario() -> None:
        rig = Rig()
        await rig.fleet.start()
        assert [s.running_groups for s in (await rig.fleet.poll()).values()] == [0, 0]
        rig.fleet.broadcaster.offer(published(1))
        await rig.fleet.settle()
        stats = await rig.fleet.poll()
        assert {s.version for s in stats.values()} == {PolicyVersion(0, 1)}
        assert {(s.full_puts, s.identical_groups) for s in stats.values()} == {(4, 3)}
        assert rig.fleet.mean_stall_s() == pytest.approx(0.02)
        assert await rig.fleet.evaluate([4, 5, 6], 1.0) == [4.0, 5.0, 6.0]
        await rig.fleet.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("fate", ["hang", "swap"])
def test_a_broken_actor_is_accounted_and_replaced_once(fate: str) -> None:
    async def scenario() -> None:
        rig = Rig(actor_0=fate)
        await rig.fleet.start()
        rig.fleet.broadcaster.offer(published(3))
        await until(lambda: rig.queue.lost == ["actor-0.0"], rig)

        def healed() -> bool:
            return any(e.engine == "actor-0" and e.outcome == "swapped" for e in rig.events)

        if fate == "hang":
            rig.events.clear()
        await until(healed, rig)
        assert rig.fleet.failure is None
        assert rig.queue.lost == ["actor-0.0"]
        stats = await rig.fleet.poll()
        assert stats["actor-0"].restarts == 1
        await rig.fleet.stop()

    asyncio.run(scenario())


def test_a_refused_first_swap_is_made_up_for_and_the_actor_is_still_watched() -> None:
    async def scenario() -> None:
        rig = Rig(actor_0="refuse")
        await rig.fleet.start()
        rig.fleet.broadcaster.offer(published(1))
        await rig.fleet.settle()
        stats = await rig.fleet.poll()
        assert {s.state for s in stats.values()} == {"running"}
        await until(lambda: sum(e.outcome == "swapped" for e in rig.events) == 2, rig)
        assert rig.queue.lost == []
        await rig.fleet.stop()

    asyncio.run(scenario())


def test_what_an_actor_did_not_evaluate_because_it_died_is_evaluated_all_the_same() -> None:
    async def scenario() -> None:
        rig = Rig(actor_0="evaluate")
        await rig.fleet.start()
        rig.fleet.broadcaster.offer(published(1))
        assert await rig.fleet.evaluate([4, 5, 6], 1.0) == [4.0, 5.0, 6.0]
        assert rig.queue.lost == ["actor-0.0"]
        await rig.fleet.stop()

    asyncio.run(scenario())


def test_the_first_failure_of_a_kind_is_told_once() -> None:
    async def scenario() -> None:
        rig = Rig()
        await rig.fleet.start()
        for _ in range(2):
            await rig.fleet.poll()
        assert rig.fleet.first_failures == {"environment_error": "OSError: no network"}
        assert sum("OSError: no network" in message for message in rig.messages) == 1
        await rig.fleet.stop()

    asyncio.run(scenario())


def test_what_nobody_foresaw_ends_the_fleet_instead_of_leaving_an_actor_unwatched() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.queue.actor_lost = lambda name: 1 // 0  # type: ignore[method-assign]
        await rig.fleet.start()
        rig.fleet.broadcaster.offer(published(1))
        await rig.fleet.settle()
        ray.kill(rig.fleet._replicas["actor-1"].handle)
        await until(lambda: rig.fleet.failure is not None, rig)
        with pytest.raises(ZeroDivisionError):
            await rig.fleet.settle()
        await rig.fleet.stop()

    asyncio.run(scenario())


def test_a_killed_actor_is_noticed() -> None:
    async def scenario() -> None:
        rig = Rig()
        await rig.fleet.start()
        rig.fleet.broadcaster.offer(published(1))
        await rig.fleet.settle()
        ray.kill(rig.fleet._replicas["actor-1"].handle)
        await until(lambda: rig.queue.lost == ["actor-1.0"], rig)
        await rig.fleet.stop()

    asyncio.run(scenario())


def test_the_restart_budget_ends_in_the_first_cause() -> None:
    async def scenario() -> None:
        rig = Rig(actor_1="swap always")
        await rig.fleet.start()
        rig.fleet.broadcaster.offer(published(1))
        await until(lambda: rig.fleet.failure is not None, rig)
        assert "actor-1 failed after 1 restarts" in str(rig.fleet.failure)
        assert "canary" in str(rig.fleet.failure)
        with pytest.raises(Exception, match="actor-1 failed"):
            await rig.fleet.settle()
        await rig.fleet.stop()

    asyncio.run(scenario())


def test_a_start_that_fails_raises_at_once() -> None:
    async def scenario() -> None:
        rig = Rig(actor_0="start")
        with pytest.raises(ray.exceptions.RayActorError):
            await rig.fleet.start()
        await rig.fleet.stop()

    asyncio.run(scenario())
