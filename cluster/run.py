"""`lagwise run`: one configuration, one run directory, one exit code."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

from cluster.checks import check_config, check_resources, check_texts
from cluster.config import RunConfig, resolved
from cluster.derived import needed_resources
from cluster.fleet import brief
from cluster.model_source import model_folder
from cluster.observing.exporter import MetricsExporter
from cluster.observing.live_view import choose_view
from cluster.observing.observers import Observers
from cluster.observing.run_directory import RunDirectory
from cluster.observing.step_log import StepLog
from cluster.observing.summary import Status, SummaryBuilder
from cluster.ray_session import ray_session
from cluster.stop_signals import StopSignals
from cluster.supervisor import Supervisor
from correction.errors import ConfigError, RunError


def run(config: RunConfig) -> int:
    """Train; returns 0, or raises ConfigError (nothing was started) or RunError (first cause)."""
    check_config(config)
    directory = RunDirectory.create(Path(config.run.root).absolute(), config.run.name)
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
            with StopSignals() as stop:
                reason = _supervised(config, directory, observers, stop)
        except ConfigError as error:
            finish("failed", "configuration", str(error))
            raise
        except Exception as error:
            finish("failed", "error", brief(error))
            raise RunError(f"{brief(error)} (see {directory.path})") from error
        except (KeyboardInterrupt, SystemExit) as error:  # Ray makes the latter of a SIGTERM
            finish("failed", "interrupted", "interrupted before its orderly end")
            raise KeyboardInterrupt from error
        finish("done", reason)
    print(f"done: {reason}; summary in {directory.summary_path}")
    return 0


def _supervised(
    config: RunConfig, directory: RunDirectory, observers: Observers, stop: StopSignals
) -> str:
    """Cluster, model, supervisor."""
    with ray_session(needed_resources(config)["CPU"]) as resources:
        stop.check()
        check_resources(config, resources)
        model_path = model_folder(config, observers)
        check_texts(config, model_path)
        with stop.orderly():
            return Supervisor(
                config,
                run_id=directory.path.name,
                model_path=model_path,
                policy_folder=directory.policy_path,
                observer=observers,
                stop_requested=stop.requested,
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
