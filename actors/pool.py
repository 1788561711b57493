"""The rollout actor: the Ray actor's class around an engine, a rollout loop and its environments.

Contract
    consumes    swap requests; tasks through its `RolloutLoop`
    produces    trajectory groups (put by the loop), samples of its state, held-out rewards
    waits for   its engine and its environments
    woken by    calls
    invariants  it acts only after `begin`; when its loop or its engine fails, every later `sample`
                raises the first cause, so that whoever watches replaces it

This class is made remote where it is launched; it is testable as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.engine import Engine
from actors.environment import Task, make_family
from actors.guarded_environment import told
from actors.renderer import make_renderer
from actors.rollout import RolloutFailure, RolloutSetting, rollout
from actors.rollout_group import account_group, rollout_group
from actors.rollout_loop import LoopCounters, RolloutLoop
from actors.settings import ActorSettings
from actors.task_queue import Grant, TaskQueue
from actors.trajectory.record import DropReason, SamplingParameters, TrajectoryGroup
from actors.weights import SwapReport, SwapRequest
from correction.errors import EngineError
from correction.versions import PolicyVersion

DRAIN_S = 5.0
"""How long a stopped loop may take to finish what runs; then it is cancelled."""


@dataclass(frozen=True, slots=True)
class ActorSample:
    """One rollout actor at one instant; counts are since it started."""

    version: PolicyVersion
    running_groups: int
    running_requests: int
    generated_tokens: int
    idle_s: float
    alive_s: float
    tool_calls: int
    environment_s: float
    first_failures: Mapping[str, str] = field(default_factory=dict)
    """The first failure of an episode for each reason, in words."""
    full_puts: int = 0
    """Puts that found the queue full and were repeated."""
    identical_groups: int = 0
    """Groups whose members all sampled the same tokens."""


class RolloutActor:
    """See the module docstring. All methods run on one event loop."""

    def __init__(self, settings: ActorSettings) -> None:
        self._settings = settings
        self._engine: Engine | None = None
        self._loop: RolloutLoop | None = None
        self._running: asyncio.Task[None] | None = None
        self._first_failures: dict[str, str] = {}
        self._began_s = time.monotonic()
        self._family = make_family(settings.environment, settings.environment_options)
        self._renderer = make_renderer(settings.engine.model_path, self._family)

    async def start(self) -> None:
        """Start the engine. Takes some ten seconds, and minutes for a large model."""
        from actors.vllm_engine import VllmEngine

        self._engine = await VllmEngine.create(self._settings.engine, PolicyVersion(0, 0))
        self._began_s = time.monotonic()

    async def begin(self, queue: TaskQueue) -> None:
        """Start acting. The weights must have been proven by a swap."""
        if self._loop is not None:
            return
        self._loop = RolloutLoop(
            actor=self._settings.name,
            engine=self._started(),
            queue=queue,
            roll_group=self._roll_group,
            groups_in_flight=self._settings.groups_in_flight,
            group_filter=self._settings.group_filter,
        )
        self._running = asyncio.create_task(self._loop.run())

    async def swap(self, request: SwapRequest) -> SwapReport:
        """See `Engine.swap`; afterwards more may be admitted, so the loop asks at once."""
        report = await self._started().swap(request)
        if self._loop is not None:
            self._loop.wake()
        return report

    async def evaluate(self, indices: Sequence[int], temperature: float) -> list[float | None]:
        """Rewards of held-out tasks, one episode each, outside queue and ledger.

        None for an episode that failed, which `sample` tells of. Raises EngineError when the
        engine dies. No more episodes at once than the engine samples, so that none spends its
        deadline waiting for a place.
        """
        places = asyncio.Semaphore(self._settings.engine.max_running_requests)
        episodes = (self._evaluate_one(index, temperature, places) for index in indices)
        rewards = list(await asyncio.gather(*episodes))
        self._started().check_alive()
        return rewards

    async def sample(self) -> ActorSample:
        """State and counts. Raises the first cause when this actor can act no more."""
        engine = self._started()
        engine.check_alive()
        if self._running is not None and self._running.done():
            self._running.result()
        stats = engine.stats()
        loop = self._loop
        counters = loop.counters if loop else LoopCounters()
        return ActorSample(
            version=engine.version,
            running_groups=loop.running_groups if loop else 0,
            running_requests=int(stats["running_requests"]),
            generated_tokens=int(stats["generated_tokens"]),
            idle_s=counters.idle_s,
            alive_s=time.monotonic() - self._began_s,
            tool_calls=counters.tool_calls,
            environment_s=counters.environment_s,
            first_failures=dict(self._first_failures),
            full_puts=counters.full_puts,
            identical_groups=counters.identical_groups,
        )

    async def stop(self) -> None:
        """Finish or cancel what runs, then end the engine's processes."""
        if self._loop is not None and self._running is not None:
            self._loop.stop()
            await asyncio.wait({self._running}, timeout=DRAIN_S)
            self._running.cancel()
            await asyncio.wait({self._running})
        if self._engine is not None:
            await self._engine.close()

    async def _roll_group(self, grant: Grant) -> TrajectoryGroup:
        run_id = self._settings.run_id
        try:
            task = self._family.task("train", grant.task_index)
        except Exception as error:  # environments are other people's code
            failure = RolloutFailure(DropReason.ENVIRONMENT_ERROR, told(error), 0)
            return account_group(
                Task(self._settings.environment, "train", grant.task_index, task_id=""),
                [failure] * grant.group_size,
                run_id=run_id,
                group_id=grant.group_id,
                on_failure=self._remember,
            )
        return await rollout_group(
            task,
            self._setting(self._settings.temperature, self._settings.engine.head_tokens),
            run_id=run_id,
            group_id=grant.group_id,
            group_size=grant.group_size,
            on_failure=self._remember,
        )

    def _remember(self, failure: RolloutFailure) -> None:
        self._first_failures.setdefault(failure.reason.value, failure.detail[:500])

    async def _evaluate_one(
        self, index: int, temperature: float, places: asyncio.Semaphore
    ) -> float | None:
        async with places:
            try:
                task = self._family.task("heldout", index)
            except Exception as error:  # environments are other people's code
                self._remember(RolloutFailure(DropReason.ENVIRONMENT_ERROR, told(error), 0))
                return None
            setting = self._setting(temperature)
            outcome = await rollout(task, setting, group_id=f"heldout/{index}", member=0)
        if isinstance(outcome, RolloutFailure):
            self._remember(outcome)
            return None
        return outcome.reward

    def _setting(self, temperature: float, head_tokens: int = 0) -> RolloutSetting:
        sampling = SamplingParameters(
            temperature, self._settings.max_turn_tokens, self._renderer.stop_token_ids, head_tokens
        )
        return RolloutSetting(
            engine=self._started(),
            family=self._family,
            renderer=self._renderer,
            sampling=sampling,
            limits=self._settings.limits,
        )

    def _started(self) -> Engine:
        if self._engine is None:
            raise EngineError("this rollout actor was not started")
        return self._engine
