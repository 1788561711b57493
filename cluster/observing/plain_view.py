"""The view where there is no terminal: a log line now and then, at evaluations and messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from cluster.observing import distributions
from cluster.observing.events import (
    ActorStats,
    BroadcastEvent,
    EvaluationEvent,
    QueueStats,
    StepEvent,
)
from cluster.observing.group_report import filtered_tokens_ratio
from cluster.observing.view_state import Clock, StepSpan, ViewState, printable


class PlainView:
    """Observer that writes lines to a stream, flushed one by one.

    every_s: about how often a progress line comes. It covers all steps since the one before, so
    that nothing happens between two lines unseen.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        total_steps: int,
        every_s: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every_s = every_s
        self._state = ViewState(total_steps=total_steps, clock=clock)
        self._since: list[StepEvent] = []
        self._stall_s = 0.0
        self._told_at_s = clock()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what the last line did not cover. Idempotent."""
        if self._since:
            self._tell()

    def on_step(self, event: StepEvent) -> None:
        """Note the step; the first one is told at once."""
        self._state.on_step(event)
        self._since.append(event)
        if self._state.steps_seen == 1:
            self._tell()
        self._tell_if_due()

    def on_broadcast(self, event: BroadcastEvent) -> None:
        """Note the swap."""
        self._state.on_broadcast(event)
        self._stall_s = max(self._stall_s, event.stall_s)
        self._tell_if_due()

    def on_queue(self, stats: QueueStats) -> None:
        """Note the reading."""
        self._state.on_queue(stats)
        self._tell_if_due()

    def on_actors(self, stats: Mapping[str, ActorStats]) -> None:
        """Note the reading."""
        self._state.on_actors(stats)
        self._tell_if_due()

    def on_evaluation(self, event: EvaluationEvent) -> None:
        """Tell the evaluation."""
        self._state.on_evaluation(event)
        failed = f" {event.failed} more failed," if event.failed else ""
        self._write(
            f"evaluation at step {event.version.step}: success {event.success:.3f}"
            f" ({event.low:.3f} to {event.high:.3f}, {event.tasks} tasks,{failed}"
            f" temperature {event.temperature:g}, {event.seconds:.1f} s)"
        )

    def on_message(self, level: str, text: str) -> None:
        """Tell the message."""
        prefix = "" if level == "info" else f"{level}: "
        self._write(prefix + printable(text))

    def _tell_if_due(self) -> None:
        if self._state.clock() - self._told_at_s >= self._every_s:
            self._tell()

    def _tell(self) -> None:
        self._write(progress_line(self._state, self._since, self._stall_s))
        self._since = []
        self._stall_s = 0.0
        self._told_at_s = self._state.clock()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def progress_line(state: ViewState, since: list[StepEvent], stall_s: float) -> str:
    """One line: the steps `since` the last line as one, and the present of the rest.

    `queue 5+12`: groups ready + groups in flight. `filtered`: share of all tokens so far.
    stall_s: longest stall of generation.
    """
    span = StepSpan.of(since)
    parts = [f"step {state.policy_version}/{state.total_steps}", *_learning(span)]
    refused = len(since) - span.steps
    if refused:
        parts.append(f"{refused} refused")
    reuse = distributions.mean(state.reuse.served_so_far())
    if reuse is not None:
        parts.append(f"reuse {reuse:.1f}")
    if state.queue:
        parts.append(f"queue {state.queue.ready_groups}+{state.queue.in_flight_groups}")
        if filtered := filtered_tokens_ratio(state.queue):
            parts.append(f"filtered {100 * filtered:.0f} %")
    if span.ess_raw is not None:
        parts.append(f"ess {span.ess_raw:.2f}")
    parts += [f"{name} {text}" for name, text in span.of_recipe()]
    if stall_s > 0:
        parts.append(f"stall {1000 * stall_s:.0f} ms")
    if state.tokens_per_s is not None:
        parts.append(f"{state.tokens_per_s:,.0f} tok/s")
    return "  ".join(parts)


def _learning(span: StepSpan) -> list[str]:
    if span.reward is None:
        return ["no step"]
    parts = [f"reward {span.reward:.2f}"]
    if span.lag_mean is not None and span.lag_max is not None:
        parts.append(f"lag {span.lag_mean:.1f} (max {span.lag_max})")
    return parts
