"""summary.json: what a run came to, accumulated from its events. Pure; the caller writes it.

The fields of `SummaryBuilder.build` are a contract (docs/run_directory.md). A quantity of which
nothing was observed is None (null), never 0: no lag measured is not lag 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

from cluster.observing import distributions
from cluster.observing.accounts import ActorAccount, LearnerClock, ReuseAccount
from cluster.observing.diagnostic_metrics import ESS_BOUNDED, ESS_RAW
from cluster.observing.distributions import Quantiles
from cluster.observing.events import (
    ActorStats,
    BroadcastEvent,
    EvaluationEvent,
    LedgerCounts,
    QueueStats,
    StepEvent,
)
from cluster.observing.group_report import group_summary
from cluster.observing.step_log import event_record
from correction.versions import PolicyVersion

Status = Literal["done", "failed"]
NOTHING = LedgerCounts(issued=0, trained=0, dropped={}, queued=0, leased=0, in_flight=0)


class SummaryBuilder:
    """Observer that accumulates a run. seed: of the run, repeated in the summary."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._version: PolicyVersion | None = None
        self._rewards: list[tuple[float, int]] = []
        self._lag_tokens: Counter[int] = Counter()
        self._lag_trajectories: Counter[int] = Counter()
        self._refused_steps = 0
        self._ess = {"raw": _WeightedMean(), "bounded": _WeightedMean()}
        self._reuse = ReuseAccount()
        self._learner = LearnerClock()
        self._actors = ActorAccount()
        self._trajectories = NOTHING
        self._tokens = NOTHING
        self._received: dict[str, int | None] = {"bytes": None, "head_bytes": None}
        self._groups = group_summary(None)
        self._broadcasts = _Broadcasts()
        self._evaluations: list[dict[str, object]] = []

    def on_step(self, event: StepEvent) -> None:
        """Count a step; only applied steps count for reward, lag and ESS."""
        self._version = event.version
        self._learner.on_step(event)
        self._reuse.on_step(event)
        if not event.applied:
            self._refused_steps += 1
            return
        self._rewards.append((event.reward_mean, event.trajectories))
        self._lag_tokens.update(event.lag_tokens)
        self._lag_trajectories.update(event.lag_trajectories)
        for stage, name in (("raw", ESS_RAW), ("bounded", ESS_BOUNDED)):
            if name in event.metrics:
                self._ess[stage].add(event.metrics[name], event.action_tokens)

    def on_broadcast(self, event: BroadcastEvent) -> None:
        """Count one engine's part in a broadcast."""
        self._broadcasts.add(event)

    def on_queue(self, stats: QueueStats) -> None:
        """Keep the last state of the ledger."""
        self._trajectories, self._tokens = stats.trajectories, stats.tokens
        self._received = {"bytes": stats.received_bytes, "head_bytes": stats.head_bytes}
        self._groups = group_summary(stats)

    def on_actors(self, stats: Mapping[str, ActorStats]) -> None:
        """Add to the fleet's totals."""
        self._actors.update(stats)

    def on_evaluation(self, event: EvaluationEvent) -> None:
        """Keep an evaluation."""
        self._evaluations.append(event_record(event))

    def on_message(self, level: str, text: str) -> None:
        """Messages are no part of a summary."""

    def build(
        self, *, status: Status, reason: str, wall_s: float, first_cause: str | None = None
    ) -> dict[str, object]:
        """The summary, ready for JSON. Can be called at any time, also of a run without events.

        reason: why the run ended. wall_s: seconds since it began. first_cause: of a failure.
        policy_version counts optimiser steps in `epoch`; reward.best is the highest mean over as
        many consecutive steps as reward.first and reward.last cover, a tenth of all.
        """
        served = self._reuse.served_so_far()
        return {
            "status": status,
            "reason": reason,
            "first_cause": first_cause,
            "seed": self._seed,
            "steps": len(self._rewards),
            "refused_steps": self._refused_steps,
            "policy_version": self._version.step if self._version else 0,
            "epoch": self._version.epoch if self._version else 0,
            "wall_s": wall_s,
            "reward": _reward(self._rewards),
            "trajectories": {"issued": self._trajectories.issued, **_ends(self._trajectories)},
            "tokens": {"generated": self._tokens.issued, **_ends(self._tokens)},
            "received": dict(self._received),
            "groups": self._groups,
            "policy_lag": {
                **_lag(self._lag_tokens),
                "per_trajectory": _lag(self._lag_trajectories),
            },
            "reuse": {"mean": distributions.mean(served), "max": distributions.largest(served)},
            "broadcast": self._broadcasts.summary(),
            "ess_ratio": {stage: pooled.value for stage, pooled in self._ess.items()},
            "idle": {
                "learner": self._learner.idle_share,
                "actors": self._actors.totals.idle_share,
            },
            "evaluation": list(self._evaluations),
        }


class _WeightedMean:
    """Mean over steps, each with the number of its action tokens."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0

    def add(self, value: float, weight: int) -> None:
        self._sum += value * weight
        self._weight += weight

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


class _Broadcasts:
    """A broadcast is one version that at least one engine was sent; each engine has its outcome."""

    def __init__(self) -> None:
        self._versions: set[PolicyVersion] = set()
        self._outcomes: Counter[str] = Counter()
        self._phases: dict[str, Quantiles] = {}
        self._stall = Quantiles()
        self._bytes = 0

    def add(self, event: BroadcastEvent) -> None:
        self._outcomes[event.outcome] += 1
        for phase, seconds in event.phases_s.items():
            self._phases.setdefault(phase, Quantiles()).add(seconds)
        if event.outcome != "skipped":
            self._versions.add(event.version)
        if event.outcome == "swapped":
            self._stall.add(event.stall_s)
            self._bytes += event.size_bytes

    def summary(self) -> dict[str, object]:
        return {
            "count": len(self._versions),
            "swapped": self._outcomes["swapped"],
            "skipped": self._outcomes["skipped"],
            "deadline": self._outcomes["deadline"],
            "failed": self._outcomes["failed"],
            "bytes": self._bytes,
            "phases_s": {phase: _p50_p95(kept) for phase, kept in sorted(self._phases.items())},
            "stall_s": {**_p50_p95(self._stall), "max": self._stall.largest},
        }


def _p50_p95(values: Quantiles) -> dict[str, float | None]:
    return {"p50": values.percentile(50), "p95": values.percentile(95)}


def _lag(histogram: Counter[int]) -> dict[str, object]:
    return {
        "mean": distributions.mean(histogram),
        "p95": distributions.percentile(histogram, 95),
        "max": distributions.largest(histogram),
        "histogram": {str(lag): histogram[lag] for lag in sorted(histogram)},
    }


def _ends(counts: LedgerCounts) -> dict[str, object]:
    return {"trained": counts.trained, "dropped": dict(counts.dropped), "open": counts.open}


def _reward(rewards: Sequence[tuple[float, int]]) -> dict[str, float | None]:
    """Pooled over trajectories. rewards: (mean, trajectories) of each applied step."""
    width = -(-len(rewards) // 10)
    sums = [0.0, *accumulate(mean * count for mean, count in rewards)]
    counts = [0, *accumulate(count for _, count in rewards)]
    means = [
        (sums[end] - sums[end - width]) / (counts[end] - counts[end - width])
        for end in range(width, len(rewards) + 1)
        if counts[end] > counts[end - width]
    ]
    if not means:
        return {"first": None, "last": None, "best": None}
    return {"first": means[0], "last": means[-1], "best": max(means)}
