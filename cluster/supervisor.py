"""One run from start to end: place everything, start it, let the learner loop, end it in order.

Contract
    consumes    a resolved configuration, observers
    produces    the reason why the run ended; events to the observers
    waits for   the learner loop, in the caller's thread
    woken by    a limit, a stop request (signal), the first failure
    invariants  nothing acts before its weights are proven; whatever happens, the queue is finished
                (every open trajectory gets its terminal state) and everything is released

Order of starting: queue, then learner and engines at once, then the first broadcast, held-out
evaluation, admission. Order of ending: admission, policy, last broadcast, evaluation, queue,
engines, learner. A stop request skips the evaluations.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cluster import assembly
from cluster.config import RunConfig
from cluster.evaluation import evaluation_event
from cluster.fleet import Fleet, FleetThread
from cluster.learner_group import LearnerGroup
from cluster.node_store import NodeStores
from cluster.observing.events import Observer
from cluster.observing.group_report import told_filtering
from cluster.observing.step_events import step_event
from cluster.trajectory_queue.ray_queue import TrajectoryQueue
from correction.errors import RunError
from learner.loop import LearnerLoop
from learner.step import StepReport

T = TypeVar("T")
POLL_S = 1.0


class Supervisor:
    """See the module docstring. One object serves one run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        model_path: Path,
        policy_folder: Path,
        observer: Observer,
        stop_requested: Callable[[], str | None],
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._model_path = model_path
        self._policy_folder = policy_folder
        self._observer = observer
        self._stop_requested = stop_requested
        self._began = time.monotonic()

    def run(self) -> str:
        """Run to the end; returns the reason. Raises the first cause of a failure."""
        with ExitStack() as stack:
            loop = stack.enter_context(_loop_thread())
            queue = TrajectoryQueue.start(assembly.queue_policy(self._config, self._run_id))
            stack.callback(queue.shutdown, force=True)
            learner = self._start_learner(stack)
            fleet = self._make_fleet(queue, stack, loop)
            self._start_together(learner, fleet, loop)
            polling = stack.enter_context(self._polling(queue, fleet, loop))
            try:
                return self._train(queue, learner, fleet, loop, polling)
            finally:
                queue.finish()
                self._observer.on_queue(queue.stats())

    # --- starting ------------------------------------------------------------------------------

    def _start_learner(self, stack: ExitStack) -> LearnerGroup:
        settings = assembly.learner_settings(self._config, self._run_id, self._model_path)
        place = self._config.learner
        learner = LearnerGroup(
            settings,
            ranks=place.ranks,
            num_cpus=place.num_cpus,
            num_gpus=place.num_gpus,
            start_deadline_s=assembly.START_DEADLINE_S,
            answer_deadline_s=self._config.run.stall_timeout_s,
        )
        stack.callback(learner.close)
        return learner

    def _make_fleet(
        self, queue: TrajectoryQueue, stack: ExitStack, loop: asyncio.AbstractEventLoop
    ) -> Fleet:
        stores = NodeStores(self._run_id)
        stack.callback(lambda: _on(loop, stores.close()))
        fleet = Fleet(
            assembly.fleet_policy(self._config),
            launch=assembly.actor_launcher(self._config, self._run_id, self._model_path),
            queue=queue,
            staging=stores,
            on_broadcast=self._observer.on_broadcast,
            on_message=self._observer.on_message,
        )
        stack.callback(lambda: _on(loop, fleet.stop()))
        return fleet

    def _start_together(
        self, learner: LearnerGroup, fleet: Fleet, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Engines take longest, so the learner starts meanwhile."""
        engines = asyncio.run_coroutine_threadsafe(fleet.start(), loop)
        learner.start()
        engines.result()
        self._observer.on_message("info", f"ready after {self._elapsed_s():.0f} s")

    # --- running -------------------------------------------------------------------------------

    def _train(
        self,
        queue: TrajectoryQueue,
        learner: LearnerGroup,
        fleet: Fleet,
        loop: asyncio.AbstractEventLoop,
        polling: Future[None],
    ) -> str:
        learner_loop = self._learner_loop(queue, learner, fleet, loop, polling)
        learner_loop.publish()
        _on(loop, fleet.settle())
        if self._config.evaluation.at_start and self._stop_requested() is None:
            self._evaluate(fleet, loop, learner_loop)
        queue.resume()
        reason = learner_loop.run()
        queue.pause("ending")
        self._observer.on_message("info", f"ending in order: {reason}")
        learner.save_policy(self._policy_folder)  # first: nothing that follows can lose it
        if self._config.evaluation.at_end and self._stop_requested() is None:
            learner_loop.publish_if_new()
            _on(loop, fleet.settle())
            self._evaluate(fleet, loop, learner_loop)
        return reason

    def _learner_loop(
        self,
        queue: TrajectoryQueue,
        learner: LearnerGroup,
        fleet: Fleet,
        loop: asyncio.AbstractEventLoop,
        polling: Future[None],
    ) -> LearnerLoop[Any]:
        def check_health() -> None:
            if fleet.failure is not None:
                raise fleet.failure
            if polling.done():  # it ends only with a cause
                polling.result()

        def explain_stall() -> str:
            stats = queue.stats()
            dropped, filtering = stats.trajectories.dropped, told_filtering(stats)
            return stall_cause(dropped, fleet.first_failures, filtering)

        return LearnerLoop(
            source=queue,
            ranks=learner,
            broadcast=FleetThread(loop, fleet),
            schedule=assembly.broadcast_schedule(self._config),
            limits=assembly.loop_limits(self._config),
            on_step=self._on_step,
            check_health=check_health,
            explain_stall=explain_stall,
            stop_requested=self._stop_requested,
        )

    def _on_step(self, report: StepReport, passes: int, step_s: float, wait_s: float) -> None:
        at_s = self._elapsed_s()
        self._observer.on_step(step_event(report, passes, at_s, step_s, wait_s))

    def _evaluate(
        self, fleet: Fleet, loop: asyncio.AbstractEventLoop, learner_loop: LearnerLoop[Any]
    ) -> None:
        settings = self._config.evaluation
        began = time.monotonic()
        outcomes = _on(loop, fleet.evaluate(range(settings.tasks), settings.temperature))
        _on(loop, fleet.poll())  # for the first failure of each kind
        if all(reward is None for reward in outcomes):
            raise RunError(f"no held-out episode ended{stall_cause({}, fleet.first_failures)}")
        self._observer.on_evaluation(
            evaluation_event(
                outcomes, learner_loop.version, settings.temperature, time.monotonic() - began
            )
        )

    @contextmanager
    def _polling(
        self, queue: TrajectoryQueue, fleet: Fleet, loop: asyncio.AbstractEventLoop
    ) -> Iterator[Future[None]]:
        """Read queue and actors about once a second while the run goes on, unless it cannot."""

        async def poll() -> None:
            while True:
                self._observer.on_actors(await fleet.poll())
                stats = await asyncio.to_thread(queue.stats)
                self._observer.on_queue(stats)
                if stats.stop_cause is not None:
                    raise RunError(stats.stop_cause)
                await asyncio.sleep(POLL_S)

        task = asyncio.run_coroutine_threadsafe(poll(), loop)
        try:
            yield task
        finally:
            task.cancel()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began


def stall_cause(
    dropped: Mapping[str, int], first_failures: Mapping[str, str], filtering: str = ""
) -> str:
    """What is known of why no data comes: the drops so far, and in words what failed first.

    filtering: in words, what the group filter dropped.
    """
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    parts = [f"dropped so far: {counts}"] if counts else []
    parts += [filtering] if filtering else []
    parts += [f"first {reason}: {detail}" for reason, detail in first_failures.items()]
    return "".join(f"; {part}" for part in parts)


def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the fleet's loop and wait for it."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()


@contextmanager
def _loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An asyncio loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fleet", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        loop.close()
