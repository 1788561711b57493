"""What a person watches: a live view on a terminal, log lines anywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console, RenderableType
from rich.live import Live

from cluster.observing.events import (
    ActorStats,
    BroadcastEvent,
    EvaluationEvent,
    Observer,
    QueueStats,
    StepEvent,
)
from cluster.observing.panels import frame
from cluster.observing.plain_view import PlainView
from cluster.observing.view_state import Clock, ViewState

MIN_REFRESH_S = 0.25


class View(Observer, Protocol):
    """An observer for a person. A context manager: what it holds of the terminal, it returns."""

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def close(self) -> None:
        """Show the last state and give the terminal back. Idempotent."""
        ...


class LiveView:
    """Observer that redraws in place, at most four times a second, in the thread that tells it."""

    def __init__(
        self,
        console: Console,
        *,
        total_steps: int,
        title: str = "lagwise",
        clock: Clock = time.monotonic,
    ) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._state = ViewState(total_steps=total_steps, clock=clock)
        self._drawn_at_s = float("-inf")
        self._live = Live(
            console=console,
            auto_refresh=False,
            get_renderable=self.render,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file or pipe still goes there
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> LiveView:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Draw the last state and give the terminal back. Idempotent."""
        if self._live.is_started:
            self._live.refresh()
        self._live.stop()

    def render(self) -> RenderableType:
        """The present state, for the console's width."""
        return frame(self._state, title=self._title, width=self._console.width)

    def on_step(self, event: StepEvent) -> None:
        """Show the step."""
        self._state.on_step(event)
        self._draw()

    def on_broadcast(self, event: BroadcastEvent) -> None:
        """Show the swap."""
        self._state.on_broadcast(event)
        self._draw()

    def on_queue(self, stats: QueueStats) -> None:
        """Show the queue."""
        self._state.on_queue(stats)
        self._draw()

    def on_actors(self, stats: Mapping[str, ActorStats]) -> None:
        """Show the actors."""
        self._state.on_actors(stats)
        self._draw()

    def on_evaluation(self, event: EvaluationEvent) -> None:
        """Show the evaluation."""
        self._state.on_evaluation(event)
        self._draw()

    def on_message(self, level: str, text: str) -> None:
        """Show the message."""
        self._state.on_message(level, text)
        self._draw()

    def _draw(self) -> None:
        now_s = self._clock()
        if self._live.is_started and now_s - self._drawn_at_s >= MIN_REFRESH_S:
            self._drawn_at_s = now_s
            self._live.refresh()


def choose_view(stream: TextIO, *, total_steps: int, title: str = "lagwise") -> View:
    """A live view where `stream` is a terminal that can be redrawn, log lines where it is not."""
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveView(Console(file=stream), total_steps=total_steps, title=title)
    return PlainView(stream, total_steps=total_steps)
