"""The broadcaster: slow engines skip, dead ones hold up nobody, nodes fetch once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from actors.weights import Canary, SwapReport, SwapRequest, WeightManifest
from cluster.broadcast import Broadcaster, Published
from cluster.observing.events import BroadcastEvent
from correction.errors import SwapError, SwapRefused
from correction.versions import PolicyVersion


def published(step: int) -> Published:
    manifest = WeightManifest("r", PolicyVersion(0, step), (), (8,), ("00",), Canary((), (), 0.0))
    return Published(manifest, (object(),), {"gather": 0.5, "put": 0.25})


class Port:
    """An engine that swaps when its gate opens."""

    def __init__(self, name: str, node: str = "n0") -> None:
        self.name = name
        self.node = node
        self.gate = asyncio.Event()
        self.gate.set()
        self.taken: list[int] = []
        self.error: Exception | None = None
        self.refusals = 0

    async def swap(self, request: SwapRequest) -> SwapReport:
        await self.gate.wait()
        if self.refusals > 0:
            self.refusals -= 1
            raise SwapRefused("superseded", "scripted")
        if self.error is not None:
            raise self.error
        self.taken.append(request.manifest.version.step)
        return SwapReport(request.manifest.version, {"load": 0.1}, stall_s=0.1, mismatch=1e-6)


class Staging:
    """Counts what is staged."""

    def __init__(self) -> None:
        self.staged: list[tuple[str, int]] = []
        self.delay_s = 0.0
        self.errors: list[Exception] = []

    async def stage(self, node: str, published: Published) -> str:
        await asyncio.sleep(self.delay_s)
        if self.errors:
            raise self.errors.pop()
        self.staged.append((node, published.version.step))
        return f"{node}-{published.version.step}"


class Rig:
    """A broadcaster with everything that it told."""

    def __init__(self, deadline_s: float = 5.0) -> None:
        self.staging = Staging()
        self.events: list[BroadcastEvent] = []
        self.failures: list[tuple[str, str]] = []
        self.swapped: list[str] = []
        self.broadcaster = Broadcaster(
            self.staging,
            deadline_s=deadline_s,
            swap_deadline_s=deadline_s,
            on_event=self.events.append,
            on_failure=lambda name, error: self.failures.append((name, type(error).__name__)),
            on_swapped=self.swapped.append,
        )

    def outcomes(self, engine: str) -> list[tuple[str, int]]:
        return [(e.outcome, e.version.step) for e in self.events if e.engine == engine]


def run(scenario: Callable[[Rig], object], deadline_s: float = 5.0) -> Rig:
    async def main() -> Rig:
        rig = Rig(deadline_s)
        await scenario(rig)  # type: ignore[misc]
        await asyncio.wait_for(rig.broadcaster.settle(), 5)
        await rig.broadcaster.close()
        return rig

    return asyncio.run(main())


def test_every_engine_swaps_and_a_node_fetches_once() -> None:
    ports = [Port("a"), Port("b"), Port("c", "n1")]

    async def scenario(rig: Rig) -> None:
        for port in ports:
            rig.broadcaster.add(port)
        rig.broadcaster.offer(published(1))

    rig = run(scenario)
    assert [port.taken for port in ports] == [[1], [1], [1]]
    assert sorted(rig.staging.staged) == [("n0", 1), ("n1", 1)]
    assert sum("gather" in event.phases_s for event in rig.events) == 1
    assert sum("fetch" in event.phases_s for event in rig.events) == 2
    assert sorted(rig.swapped) == ["a", "b", "c"]


def test_a_busy_engine_skips_to_the_latest_and_others_go_on() -> None:
    slow, quick = Port("slow"), Port("quick")

    async def scenario(rig: Rig) -> None:
        rig.broadcaster.add(slow)
        rig.broadcaster.add(quick)
        slow.gate.clear()
        for step in (1, 2, 3, 4):
            rig.broadcaster.offer(published(step))
            await asyncio.sleep(0.02)
        assert quick.taken == [1, 2, 3, 4]
        assert not rig.broadcaster.in_progress
        slow.gate.set()

    rig = run(scenario)
    assert slow.taken == [1, 4]
    assert rig.outcomes("slow") == [
        ("skipped", 2),
        ("skipped", 3),
        ("swapped", 1),
        ("swapped", 4),
    ]


def test_in_progress_only_while_all_are_busy() -> None:
    port = Port("a")

    async def scenario(rig: Rig) -> None:
        assert not rig.broadcaster.in_progress
        rig.broadcaster.add(port)
        port.gate.clear()
        rig.broadcaster.offer(published(1))
        assert rig.broadcaster.in_progress
        port.gate.set()
        await rig.broadcaster.settle()
        assert not rig.broadcaster.in_progress

    run(scenario)


@pytest.mark.parametrize("kind", ["deadline", "failed"])
def test_a_hung_or_failing_engine_is_given_up(kind: str) -> None:
    bad, good = Port("bad"), Port("good")

    async def scenario(rig: Rig) -> None:
        rig.broadcaster.add(bad)
        rig.broadcaster.add(good)
        if kind == "deadline":
            bad.gate.clear()
        else:
            bad.error = SwapError("canary")
        rig.broadcaster.offer(published(1))

    rig = run(scenario, deadline_s=0.1)
    assert rig.outcomes("bad") == [(kind, 1)]
    assert rig.outcomes("good") == [("swapped", 1)]
    assert rig.failures == [("bad", "EngineError" if kind == "deadline" else "SwapError")]


def test_a_replaced_engine_takes_the_latest_at_once() -> None:
    port = Port("late")

    async def scenario(rig: Rig) -> None:
        rig.broadcaster.offer(published(7))
        rig.broadcaster.add(port)

    run(scenario)
    assert port.taken == [7]


def test_a_removed_engine_is_left_alone() -> None:
    port = Port("gone")

    async def scenario(rig: Rig) -> None:
        rig.broadcaster.add(port)
        port.gate.clear()
        rig.broadcaster.offer(published(1))
        await asyncio.sleep(0.01)
        rig.broadcaster.remove("gone")

    rig = run(scenario)
    assert port.taken == []
    assert rig.events == []


def test_staging_that_hangs_fails_the_engines_of_that_node_only_after_the_deadline() -> None:
    port = Port("a")

    async def scenario(rig: Rig) -> None:
        rig.staging.delay_s = 10.0
        rig.broadcaster.add(port)
        rig.broadcaster.offer(published(1))

    rig = run(scenario, deadline_s=0.1)
    assert rig.outcomes("a") == [("deadline", 1)]


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.broadcast.REFUSAL_PAUSES_S", (0.0, 0.01))


@pytest.mark.usefixtures("no_pauses")
def test_a_refused_swap_is_tried_again_when_nothing_newer_comes() -> None:
    port = Port("a")
    port.refusals = 2

    async def scenario(rig: Rig) -> None:
        rig.broadcaster.add(port)
        rig.broadcaster.offer(published(1))

    rig = run(scenario)
    assert port.taken == [1]
    assert rig.outcomes("a") == [("swapped", 1)]
    assert rig.staging.staged == [("n0", 1)] * 3  # a fresh segment each time


@pytest.mark.usefixtures("no_pauses")
def test_an_engine_that_refuses_for_ever_is_given_up() -> None:
    port = Port("a")
    port.refusals = 99

    async def scenario(rig: Rig) -> None:
        rig.broadcaster.add(port)
        rig.broadcaster.offer(published(1))

    rig = run(scenario)
    assert rig.outcomes("a") == [("failed", 1)]
    assert rig.failures == [("a", "SwapRefused")]


def test_a_refused_swap_gives_way_to_a_newer_version() -> None:
    port = Port("a")
    port.refusals = 1

    async def scenario(rig: Rig) -> None:
        rig.broadcaster.add(port)
        port.gate.clear()
        rig.broadcaster.offer(published(1))
        rig.broadcaster.offer(published(2))
        port.gate.set()

    rig = run(scenario)
    assert rig.outcomes("a") == [("skipped", 1), ("swapped", 2)]


@pytest.mark.usefixtures("no_pauses")
def test_a_store_that_dies_costs_no_engine() -> None:
    ports = [Port("a"), Port("b")]

    async def scenario(rig: Rig) -> None:
        rig.staging.errors = [OSError("the store is gone")]
        for port in ports:
            rig.broadcaster.add(port)
        rig.broadcaster.offer(published(1))

    rig = run(scenario)
    assert [port.taken for port in ports] == [[1], [1]]
    assert rig.failures == []
