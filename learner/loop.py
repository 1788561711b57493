"""The learner's loop: lease a batch, train on it, ack it, publish when it is due.

Contract
    consumes    leased batches of the trajectory queue
    produces    acks with the new version, step events, published versions
    waits for   a batch, at most `stall_timeout_s` without any progress
    woken by    the queue
    invariants  a batch is acked only after its last pass, with the passes that were applied; the
                version moves only with applied steps; two broadcasts never queue up; whoever
                fails first is the cause that is raised
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from correction.errors import RunError
from correction.versions import PolicyVersion
from learner.schedule import BroadcastSchedule, Measured
from learner.step import StepReport


class Batch(Protocol):
    """A leased batch."""

    @property
    def lease_id(self) -> int:
        """Its lease."""
        ...

    @property
    def payloads(self) -> Sequence[bytes]:
        """Encoded trajectory groups."""
        ...


class TrajectorySource(Protocol):
    """The trajectory queue as the learner sees it."""

    def lease(self, timeout_s: float) -> Batch | None:
        """A batch, or None after `timeout_s`."""
        ...

    def ack(self, lease_id: int, version: PolicyVersion, passes: int) -> bool:
        """The batch served `passes` applied passes; the learner is at `version`. False where the
        lease had run out: then nothing was counted."""
        ...

    def lag_blocked(self, engine_step: int) -> bool:
        """Whether engines at `engine_step` may start nothing only because they are behind."""
        ...


P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)


class Ranks(Protocol[P_co]):
    """The learner's ranks, called together. P: a published version."""

    def train(self, payloads: Sequence[bytes], version: PolicyVersion) -> list[StepReport]:
        """One report a pass."""
        ...

    def gather(self) -> P_co:
        """The present weights, ready to travel."""
        ...


class Broadcast(Protocol[P_contra]):
    """Takes published versions to the engines in the background."""

    @property
    def in_progress(self) -> bool:
        """Whether every engine is still busy with an earlier version."""
        ...

    def offer(self, published: P_contra) -> None:
        """Make it the latest."""
        ...

    def mean_stall_s(self) -> float:
        """Measured stall of generation in a swap, averaged over engines; 0 before the first."""
        ...


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """max_steps: applied optimiser steps after which to stop. max_wall_s: None for no limit.
    stall_timeout_s: longest wait for a batch. max_non_finite_steps: refused steps in a row."""

    max_steps: int
    max_wall_s: float | None
    stall_timeout_s: float
    max_non_finite_steps: int


class LearnerLoop(Generic[P]):
    """See the module docstring."""

    def __init__(
        self,
        *,
        source: TrajectorySource,
        ranks: Ranks[P],
        broadcast: Broadcast[P],
        schedule: BroadcastSchedule,
        limits: LoopLimits,
        on_step: Callable[[StepReport, int, float, float], None],
        check_health: Callable[[], None],
        explain_stall: Callable[[], str],
        stop_requested: Callable[[], str | None],
    ) -> None:
        """on_step(report, passes of its batch, seconds of the step, seconds waited before it);
        check_health raises the first cause when the run cannot go on; explain_stall says what is
        known of why no batch comes; stop_requested gives the reason when somebody wants the run to
        end."""
        self._source = source
        self._ranks = ranks
        self._broadcast = broadcast
        self._schedule = schedule
        self._limits = limits
        self._on_step = on_step
        self._check_health = check_health
        self._explain_stall = explain_stall
        self._stop_requested = stop_requested
        self._measured = Measured()
        self._published_step = -1
        self._refused_in_a_row = 0
        self._began = time.monotonic()
        self.version = PolicyVersion(0, 0)

    def publish(self) -> None:
        """Gather the present weights and offer them to the engines."""
        began = time.monotonic()
        self._broadcast.offer(self._ranks.gather())
        spent_s = time.monotonic() - began + self._broadcast.mean_stall_s()
        self._measured = self._measured.with_broadcast(spent_s)
        self._published_step = self.version.step

    def publish_if_new(self) -> None:
        """Publish unless the engines were offered this very version already."""
        if self.version.step > self._published_step:
            self.publish()

    def run(self) -> str:
        """Train until a limit or a request; returns the reason. Raises the first cause else."""
        while (reason := self._ended()) is None:
            began = time.monotonic()
            batch = self._next_batch()
            if batch is not None:
                self._train(batch, waited_s=time.monotonic() - began)
                self._publish_if_due()
        return reason

    def _ended(self) -> str | None:
        if self.version.step >= self._limits.max_steps:
            return "max_steps"
        wall_s = time.monotonic() - self._began
        if self._limits.max_wall_s is not None and wall_s >= self._limits.max_wall_s:
            return "max_wall_s"
        return self._stop_requested()

    def _next_batch(self) -> Batch | None:
        """A batch; None when the run is asked to end meanwhile."""
        deadline = time.monotonic() + self._limits.stall_timeout_s
        while (batch := self._source.lease(timeout_s=0.5)) is None:
            self._check_health()
            self._publish_if_due()
            if self._ended() is not None:
                return None
            if time.monotonic() > deadline:
                raise RunError(
                    f"no batch for {self._limits.stall_timeout_s:.0f} s "
                    f"(run.stall_timeout_s) at version {self.version}{self._explain_stall()}"
                )
        return batch

    def _train(self, batch: Batch, waited_s: float) -> None:
        """All passes over one batch, then its ack."""
        began = time.monotonic()
        reports = self._ranks.train(batch.payloads, self.version)
        step_s = (time.monotonic() - began) / len(reports)
        self.version = reports[-1].version
        applied = sum(report.applied for report in reports)
        if not self._source.ack(batch.lease_id, self.version, applied):
            raise RunError(
                f"the batch was given out again while it was trained: a step took {step_s:.0f} s, "
                "longer than its lease (queue.lease_s)"
            )
        self._measured = self._measured.with_step(step_s)
        for report in reports:
            self._on_step(report, len(reports), step_s, waited_s)
            waited_s = 0.0
        self._count_refused(reports)

    def _count_refused(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self._refused_in_a_row = 0 if report.applied else self._refused_in_a_row + 1
        if self._refused_in_a_row > self._limits.max_non_finite_steps:
            raise RunError(
                f"{self._refused_in_a_row} optimiser steps in a row were refused: the gradient is "
                f"not finite (norm {reports[-1].gradient_norm}) at version {self.version}"
            )

    def _publish_if_due(self) -> None:
        reason = self._schedule.decide(
            versions_since=self.version.step - self._published_step,
            in_progress=self._broadcast.in_progress,
            starved=self.version.step > self._published_step
            and self._source.lag_blocked(self._published_step),
            measured=self._measured,
        )
        if reason.go:
            self.publish()
