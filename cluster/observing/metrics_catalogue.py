"""Every Prometheus metric of a run, as data, in one place.

The exporter can only write what stands here, and `docs/metrics.md` is generated from it:
`python -m cluster.observing.metrics_catalogue`. Names carry the prefix `lagwise_` and base
units; labels are bounded; versions are values, never labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, zip_longest
from pathlib import Path

from actors.trajectory.record import DropReason
from cluster.observing import diagnostic_metrics, group_report
from cluster.observing.metric import Kind, Metric, Section

LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
REUSE_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
DURATION_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
DROP_REASONS = tuple(reason.value for reason in DropReason)
BROADCAST_PHASES = ("gather", "put", "fetch", "pause", "load", "verify", "resume")
BROADCAST_OUTCOMES = ("swapped", "skipped", "deadline", "failed")
ACTOR_STATES = ("starting", "running", "swapping", "dead")
LEARNER_PHASES = ("decode", "score", "collate", "forward_backward", "optimiser")
REFUSAL_RULES = ("lag", "bytes", "tail", "paused")
MAX_REPLICA_SERIES = 4096


def _policy_lag() -> tuple[Metric, ...]:
    add = Section("Policy lag and reuse")
    return (
        add.histogram(
            "token_policy_lag_versions",
            "Policy lag of every action token, in optimiser steps, where an applied step used it.",
            LAG_BUCKETS,
        ),
        add.histogram(
            "trajectory_policy_lag_versions",
            "Policy lag of every trajectory (its oldest token) where an applied step used it.",
            LAG_BUCKETS,
        ),
        add.gauge("batch_policy_lag_max_versions", "Largest policy lag in the last batch, exact."),
        add.gauge(
            "batch_policy_lag_mean_versions", "Token-weighted mean policy lag of the last batch."
        ),
        add.gauge("policy_lag_bound_versions", "The configured bound: max_lag."),
        add.histogram(
            "trajectory_reuse_passes",
            "Applied optimiser passes that a trajectory had served when its batch retired.",
            REUSE_BUCKETS,
        ),
        add.gauge("reuse_mean_passes", "Mean passes served by all trajectories retired so far."),
        add.gauge("reuse_bound_passes", "The configured bound: max_reuse."),
    )


def _learner() -> tuple[Metric, ...]:
    add = Section("Learner")
    return (
        add.counter(
            "steps",
            "Optimiser steps, applied or refused as non-finite.",
            "outcome",
            ("applied", "refused"),
        ),
        add.histogram("step_seconds", "Duration of an optimiser step.", DURATION_BUCKETS),
        add.counter("learner_wait_seconds", "Time that the learner waited for data."),
        add.counter(
            "learner_phase_seconds", "Time in each part of the step.", "phase", LEARNER_PHASES
        ),
        add.counter(
            "learner_action_tokens", "Action tokens in applied steps; every pass counts again."
        ),
        add.gauge("learner_policy_version", "Optimiser steps applied to the weights."),
        add.gauge("learner_epoch", "Incarnation of the learner, from 0."),
        add.gauge("reward_mean", "Mean reward of the trajectories of the last step."),
        add.gauge("reward_part_mean", "Mean of each named part of the reward, last step.", "part"),
        add.gauge("loss", "Loss of the last step."),
        add.gauge("gradient_norm", "Global gradient norm of the last step, before clipping."),
        add.gauge("learning_rate", "Learning rate of the last step."),
        add.gauge("padding_ratio", "Share of padding in the tokens of the last step."),
    )


def _queue() -> tuple[Metric, ...]:
    add = Section("Trajectory queue")
    return (
        add.gauge(
            "queue_groups", "Groups by place.", "state", known=("ready", "leased", "in_flight")
        ),
        add.gauge("queue_bytes", "Bytes of the groups that wait."),
        add.counter("queue_received_bytes", "Bytes of the groups taken in."),
        add.counter(
            "queue_head_bytes",
            "Bytes of heads among them: ids and logprobs of the likeliest tokens, where asked for.",
        ),
        add.gauge("queue_head_ratio", "Share of heads in the bytes taken in."),
        add.gauge("queue_oldest_age_seconds", "Age of the oldest group that waits, 0 if none."),
        add.gauge("queue_capacity_groups", "Groups that could be admitted now."),
        add.counter(
            "queue_refused", "Admissions refused, by the rule that refused.", "rule", REFUSAL_RULES
        ),
        add.counter("queue_duplicates", "Groups put more than once."),
        add.counter("queue_rejected", "Payloads refused by the codec, by its reason.", "reason"),
    )


def _ledger() -> tuple[Metric, ...]:
    add = Section("Ledger")
    return (
        add.counter("trajectories_issued", "Trajectories admitted."),
        add.counter("trajectories_trained", "Trajectories that served their last pass."),
        add.counter("trajectories_dropped", "Trajectories dropped.", "reason", DROP_REASONS),
        add.gauge(
            "trajectories_open",
            "Trajectories with no end yet.",
            "state",
            known=("queued", "leased", "in_flight"),
        ),
        add.counter("tokens_generated", "Action tokens generated and reported."),
        add.counter("tokens_trained", "Action tokens trained on; each counts once."),
        add.counter("tokens_dropped", "Action tokens dropped.", "reason", DROP_REASONS),
        add.gauge(
            "tokens_open",
            "Reported action tokens with no end yet.",
            "state",
            known=("queued", "leased", "in_flight"),
        ),
    )


def _broadcast() -> tuple[Metric, ...]:
    add = Section("Broadcast")
    return (
        add.counter(
            "broadcast_outcomes",
            "What became of each engine's part in a broadcast.",
            "outcome",
            BROADCAST_OUTCOMES,
        ),
        add.histogram(
            "broadcast_phase_seconds",
            "Duration of each phase of a broadcast.",
            DURATION_BUCKETS,
            "phase",
            BROADCAST_PHASES,
        ),
        add.histogram(
            "generation_stall_seconds",
            "How long generation stood still in a swap, pause to resume.",
            DURATION_BUCKETS,
        ),
        add.counter("broadcast_bytes", "Bytes of weights that engines loaded."),
        add.gauge(
            "broadcast_last_success_timestamp_seconds",
            "Unix time at which an engine last proved a swap.",
        ),
        add.gauge(
            "canary_mismatch_nats",
            "Largest difference of canary logprobs, engine against learner, last swap.",
            "replica",
            max_series=MAX_REPLICA_SERIES,
        ),
    )


def _actors() -> tuple[Metric, ...]:
    add = Section("Actors and environments")
    return (
        add.gauge("actors", "Rollout actors by state.", "state", known=ACTOR_STATES),
        add.gauge(
            "actor_policy_version",
            "Policy version that each rollout actor serves.",
            "replica",
            max_series=MAX_REPLICA_SERIES,
        ),
        add.gauge("running_groups", "Groups in the hands of the actors."),
        add.gauge("running_requests", "Requests running in all engines."),
        add.counter("actor_sampled_tokens", "Tokens sampled by all engines, finished or not."),
        add.counter("actor_idle_seconds", "Time of all actors with no group running."),
        add.counter("actor_alive_seconds", "Lifetime of all actors."),
        add.counter("actor_restarts", "Restarts of rollout actors."),
        add.counter("environment_seconds", "Time spent in environments and their tools."),
        add.counter("tool_calls", "Tool calls executed."),
        add.counter("actor_full_puts", "Puts that found the queue full and were repeated."),
        add.counter(
            "identical_groups", "Finished groups whose members all sampled the same tokens."
        ),
        add.gauge("idle_ratio", "Share of time since the start spent waiting.", "role"),
    )


def _run() -> tuple[Metric, ...]:
    add = Section("Evaluation and run")
    return (
        add.counter("evaluations", "Held-out evaluations."),
        add.gauge(
            "evaluation_success_ratio",
            "Mean held-out reward: estimate and bounds of its 95 % interval.",
            "bound",
        ),
        add.gauge("evaluation_tasks", "Tasks in the last evaluation."),
        add.gauge("evaluation_version", "Policy version of the last evaluation."),
        add.gauge("evaluation_seconds", "Duration of the last evaluation."),
        add.counter("messages", "Log messages by level.", "level", ("info", "warning", "error")),
        add.gauge(
            "build_info",
            "Always 1; versions of lagwise and of what it runs on.",
            "version",
            "python",
            "torch",
            "vllm",
            "deepspeed",
            "ray",
        ),
        add.counter(
            "label_sets_refused", "Values not exported because a metric had its most label sets."
        ),
    )


CATALOGUE: dict[str, Metric] = {
    metric.name: metric
    for section in (
        _policy_lag(),
        diagnostic_metrics.METRICS,
        _learner(),
        _queue(),
        _ledger(),
        group_report.METRICS,
        _broadcast(),
        _actors(),
        _run(),
    )
    for metric in section
}
"""Every metric, by name, in the order of the reference."""


def reference() -> str:
    """The metric reference as Markdown."""
    return "\n".join(_reference_lines()) + "\n"


def _reference_lines() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "Generated by `python -m cluster.observing.metrics_catalogue`; edit the catalogue,"
    yield "not this file."
    yield ""
    yield "Each run serves these on its own endpoint, by default on loopback. Policy versions are"
    yield "values, never labels. A replica that is gone vanishes; a counter never falls. The"
    yield "ledger closes in every scrape: issued = trained + dropped + open."
    yield ""
    yield "What stands under Correction describes the last step. A figure that it does not have,"
    yield "because of its recipe or because no token has such a lag, is absent, never 0."
    for section, metrics in groupby(CATALOGUE.values(), key=lambda metric: metric.section):
        yield from ("", f"## {section}", "", "| metric | type | labels | meaning |")
        yield "|---|---|---|---|"
        for metric in metrics:
            yield _reference_row(metric)
    yield from ("", "## Only in steps.jsonl", "", "| figure of a step | why |", "|---|---|")
    for figure, why in diagnostic_metrics.LEFT_OUT.items():
        yield f"| `{figure}` | {why} |"


def _reference_row(metric: Metric) -> str:
    known = diagnostic_metrics.LABEL_VALUES.get(metric.name) or (metric.known,)
    labels = "; ".join(
        f"`{label}`" + (": " + ", ".join(values) if values else "")
        for label, values in zip_longest(metric.labels, known, fillvalue=())
        if label
    )
    meaning = metric.help.replace("|", "\\|")
    if metric.kind is Kind.HISTOGRAM:
        meaning += " Buckets: " + ", ".join(f"{bound:g}" for bound in metric.buckets) + "."
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {meaning} |"


REFERENCE_PATH = Path(__file__).parents[2] / "docs" / "metrics.md"

if __name__ == "__main__":
    REFERENCE_PATH.write_text(reference(), encoding="utf-8")
    print(f"wrote {len(CATALOGUE)} metrics to {REFERENCE_PATH.name}")
