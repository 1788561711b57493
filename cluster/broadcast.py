"""Carrying published weights to every engine, each at its own pace.

Contract
    consumes    `Published` versions (offer)
    produces    a BroadcastEvent for every engine and version: swapped, skipped, deadline, failed
    waits for   each engine by itself, never longer than its deadline
    woken by    an offer, the end of an engine's swap
    invariants  one swap at a time on an engine; while it is busy only the latest version waits
                for it, so that two broadcasts never queue up; a slow or dead engine holds up
                nobody else; weights are fetched once a node and version; every engine ends up
                with the latest version, or is reported as failed

Runs on one asyncio loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.weights import SwapReport, SwapRequest, WeightManifest
from cluster.observing.events import BroadcastEvent
from correction.errors import EngineError, SwapRefused
from correction.versions import PolicyVersion

REFUSAL_PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Pauses between the tries of a swap that was refused."""


@dataclass(frozen=True, slots=True)
class Published:
    """One version made available: its manifest, references to its buckets, what it took."""

    manifest: WeightManifest
    buckets: tuple[Any, ...]
    phases_s: dict[str, float] = field(default_factory=dict)

    @property
    def version(self) -> PolicyVersion:
        """The version."""
        return self.manifest.version


class EnginePort(Protocol):
    """One engine as the broadcaster sees it."""

    @property
    def name(self) -> str:
        """Stable name of the replica."""
        ...

    @property
    def node(self) -> str:
        """Node that it runs on."""
        ...

    async def swap(self, request: SwapRequest) -> SwapReport:
        """See `actors.engine.Engine.swap`."""
        ...


class Staging(Protocol):
    """Brings a version's buckets into one shared-memory segment of a node."""

    async def stage(self, node: str, published: Published) -> str:
        """Name of the segment."""
        ...


@dataclass(slots=True)
class _Lane:
    port: EnginePort
    busy: asyncio.Task[None] | None = None
    waiting: Published | None = None


class Broadcaster:
    """See the module docstring.

    on_event receives every outcome; on_failure(name, cause) an engine that must be replaced;
    on_swapped(name) an engine that serves a newer version now.
    """

    def __init__(
        self,
        staging: Staging,
        *,
        deadline_s: float,
        swap_deadline_s: float,
        on_event: Callable[[BroadcastEvent], None],
        on_failure: Callable[[str, BaseException], None],
        on_swapped: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._staging = staging
        self._deadline_s = deadline_s
        self._swap_deadline_s = swap_deadline_s
        self._on_event = on_event
        self._on_failure = on_failure
        self._on_swapped = on_swapped
        self._lanes: dict[str, _Lane] = {}
        self._staged: dict[tuple[str, PolicyVersion], asyncio.Task[tuple[str, float]]] = {}
        self._told: deque[PolicyVersion] = deque(maxlen=256)
        self.latest: Published | None = None

    def add(self, port: EnginePort) -> None:
        """A new or replaced engine; it takes the latest version at once."""
        self._lanes[port.name] = _Lane(port)
        if self.latest is not None:
            self._start(self._lanes[port.name], self.latest)

    def remove(self, name: str) -> None:
        """An engine is gone; a swap under way on it is abandoned."""
        lane = self._lanes.pop(name, None)
        if lane is not None and lane.busy is not None:
            lane.busy.cancel()

    def offer(self, published: Published) -> None:
        """Make a version the latest; idle engines take it now, busy ones when they are free."""
        self.latest = published
        self._forget_staged(older_than=published.version)
        for lane in self._lanes.values():
            if lane.busy is None:
                self._start(lane, published)
                continue
            if lane.waiting is not None:
                self._tell(lane.port.name, lane.waiting, "skipped", {})
            lane.waiting = published

    @property
    def in_progress(self) -> bool:
        """Whether every engine is busy with an earlier version. May be asked from any thread."""
        lanes = list(self._lanes.values())
        return bool(lanes) and all(lane.busy is not None for lane in lanes)

    async def settle(self) -> None:
        """Wait until no engine is busy and none has a version waiting."""
        while tasks := [lane.busy for lane in self._lanes.values() if lane.busy is not None]:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Abandon everything under way."""
        tasks = [lane.busy for lane in self._lanes.values() if lane.busy is not None]
        for task in [*tasks, *self._staged.values()]:
            task.cancel()
        await asyncio.gather(*tasks, *self._staged.values(), return_exceptions=True)

    def _start(self, lane: _Lane, published: Published) -> None:
        lane.waiting = None
        lane.busy = asyncio.create_task(self._swap(lane, published))

    async def _swap(self, lane: _Lane, published: Published) -> None:
        """One engine takes one version; what waits for it then follows."""
        try:
            await self._carry(lane, published)
        except SwapRefused as refusal:
            if lane.waiting is None:  # nobody would ever ask this engine again
                self._fail(lane, published, "failed", refusal)
                return
            self._tell(lane.port.name, published, "skipped", {})
        except TimeoutError as error:
            late = EngineError(
                f"the swap to {published.version} did not end within {self._deadline_s:g} s"
            )
            late.__cause__ = error
            self._staged.pop((lane.port.node, published.version), None)
            self._fail(lane, published, "deadline", late)
            return
        except Exception as error:  # accounted, and the engine is replaced
            self._fail(lane, published, "failed", error)
            return
        self._free(lane)

    async def _carry(self, lane: _Lane, published: Published) -> None:
        """Stage and swap. A refusal touched nothing, so it is tried again after a pause, from a
        segment of its own, unless something newer waits. Raises the last refusal."""
        for pause_s in (*REFUSAL_PAUSES_S, None):
            try:
                await self._try(lane, published)
                return
            except SwapRefused:
                self._staged.pop((lane.port.node, published.version), None)
                if lane.waiting is not None or pause_s is None:
                    raise
                await asyncio.sleep(pause_s)

    async def _try(self, lane: _Lane, published: Published) -> None:
        segment, phases_s = await self._segment(lane.port.node, published)
        request = SwapRequest(published.manifest, segment, self._swap_deadline_s)
        report = await asyncio.wait_for(lane.port.swap(request), self._deadline_s)
        name = lane.port.name
        self._tell(name, published, "swapped", {**phases_s, **report.phases_s}, report)
        self._on_swapped(name)

    def _free(self, lane: _Lane) -> None:
        """The engine is idle again; the version that waits for it follows."""
        lane.busy = None
        if lane.waiting is not None:
            self._start(lane, lane.waiting)

    def _fail(self, lane: _Lane, published: Published, outcome: str, error: BaseException) -> None:
        lane.busy = None
        self._lanes.pop(lane.port.name, None)
        self._tell(lane.port.name, published, outcome, {})
        self._on_failure(lane.port.name, error)

    async def _segment(self, node: str, published: Published) -> tuple[str, dict[str, float]]:
        """Segment on a node; with the seconds it took to bring it there for the first who asks.

        Raises SwapRefused where that failed, which is no engine's fault.
        """
        key = (node, published.version)
        first = key not in self._staged
        if first:
            self._staged[key] = asyncio.create_task(self._stage(node, published))
        staged = self._staged[key]
        try:
            segment, fetch_s = await asyncio.shield(staged)
        except (SwapRefused, TimeoutError):
            raise
        except Exception as error:
            raise SwapRefused("missing", f"staging on node {node}: {error}") from error
        return segment, {"fetch": fetch_s} if first else {}

    async def _stage(self, node: str, published: Published) -> tuple[str, float]:
        began = time.monotonic()
        segment = await asyncio.wait_for(self._staging.stage(node, published), self._deadline_s)
        return segment, time.monotonic() - began

    def _forget_staged(self, older_than: PolicyVersion) -> None:
        for key in [key for key in self._staged if key[1] < older_than]:
            if self._staged[key].done():
                del self._staged[key]

    def _tell(
        self,
        name: str,
        published: Published,
        outcome: str,
        phases_s: dict[str, float],
        report: SwapReport | None = None,
    ) -> None:
        """One event; what the learner spent on the version goes with its first engine."""
        if outcome == "swapped" and published.version not in self._told:
            self._told.append(published.version)
            phases_s = {**published.phases_s, **phases_s}
        self._on_event(
            BroadcastEvent(
                engine=name,
                version=published.version,
                outcome=outcome,
                phases_s=phases_s,
                stall_s=report.stall_s if report else 0.0,
                mismatch=report.mismatch if report else 0.0,
                size_bytes=published.manifest.total_bytes,
            )
        )
