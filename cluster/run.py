"""`lagwise run`: one configuration, one run directory, one exit code."""

from __future__ import annotations

import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from cluster import assembly
from cluster.checks import check_config, check_resources
from cluster.config import RunConfig, resolved
from cluster.fleet import brief
from cluster.model_source import model_folder
from cluster.observing.exporter import MetricsExporter
from cluster.observing.live_view import choose_view
from cluster.observing.observers import Observers
from cluster.observing.run_directory import RunDirectory
from cluster.observing.step_log import StepLog
from cluster.observing.summary import Status, SummaryBuilder
from cluster.ray_session import ray_session
from cluster.supervisor import Supervisor
from correction.errors import ConfigError, RunError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: RunConfig) -> int:
    """Train; returns 0, or raises ConfigError (nothing was started) or RunError (first cause)."""
    check_config(config)
    directory = RunDirectory.create(Path(config.run.root), config.run.name)
    directory.write_config(resolved(config))
    summary = SummaryBuilder(seed=config.run.seed)
    began = time.monotonic()

    def finish(status: Status, reason: str, first_cause: str | None = None) -> None:
        wall_s = time.monotonic() - began
        directory.write_summary(
            summary.build(status=status, reason=reason, wall_s=wall_s, first_cause=first_cause)
        )

    with ExitStack() as stack:
        observers = _observers(config, directory, summary, stack)
        observers.on_message("info", f"run {directory.path} seed {config.run.seed}")
        try:
            reason = _supervised(config, directory, observers)
        except ConfigError as error:
            finish("failed", "configuration", str(error))
            raise
        except Exception as error:
            finish("failed", "error", brief(error))
            raise RunError(f"{brief(error)} (see {directory.path})") from error
        finish("done", reason)
    print(f"done: {reason}; summary in {directory.summary_path}")
    return 0


def _supervised(config: RunConfig, directory: RunDirectory, observers: Observers) -> str:
    """Cluster, model, supervisor."""
    with ray_session(assembly.needed_resources(config)["CPU"]) as resources:
        check_resources(config, resources)
        model_path = model_folder(config, observers)
        with _stop_signals() as stop_requested:
            return Supervisor(
                config,
                run_id=directory.path.name,
                model_path=model_path,
                policy_folder=directory.policy_path,
                observer=observers,
                stop_requested=stop_requested,
            ).run()


def _observers(
    config: RunConfig, directory: RunDirectory, summary: SummaryBuilder, stack: ExitStack
) -> Observers:
    view = stack.enter_context(choose_view(sys.stdout, total_steps=config.run.max_steps))
    log = stack.enter_context(closing(StepLog(directory.steps_path)))
    observers = Observers([summary, log, view])
    if config.metrics.enabled:
        exporter = MetricsExporter(
            address=config.metrics.host,
            port=config.metrics.port,
            max_lag=config.lag.max_lag_versions,
            max_reuse=config.learner.max_reuse,
        )
        stack.enter_context(closing(exporter))
        observers.add(exporter)
        observers.on_message("info", f"metrics on port {exporter.port} of {config.metrics.host}")
    return observers


@contextmanager
def _stop_signals() -> Iterator[Callable[[], str | None]]:
    """The first SIGTERM or Ctrl-C asks for an orderly end, the second ends at once."""
    asked: list[str] = []

    def ask(number: int, frame: types.FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    before = {number: signal.signal(number, ask) for number in STOP_SIGNALS}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
