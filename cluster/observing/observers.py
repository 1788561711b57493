"""Fan-out of a run's events: what watches a run must never be able to kill it.

An observer that raises is removed and reported once, through `on_message`, to those that remain.
The learner loop and the fleet tell from threads of their own; observers are told one event at a
time, so that none needs a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from cluster.observing.events import (
    ActorStats,
    BroadcastEvent,
    EvaluationEvent,
    Observer,
    QueueStats,
    StepEvent,
)


class Observers:
    """An Observer that tells several others, in the order given."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers: list[Observer] = list(observers)
        self._lock = threading.RLock()  # re-entrant: a failure is reported while telling

    def add(self, observer: Observer) -> None:
        """Tell this one too from now on."""
        with self._lock:
            self._observers.append(observer)

    @property
    def active(self) -> tuple[Observer, ...]:
        """Those that are still told."""
        return tuple(self._observers)

    def on_step(self, event: StepEvent) -> None:
        """An optimiser step was made."""
        self._tell("on_step", lambda observer: observer.on_step(event))

    def on_broadcast(self, event: BroadcastEvent) -> None:
        """An engine took, skipped or failed a broadcast."""
        self._tell("on_broadcast", lambda observer: observer.on_broadcast(event))

    def on_queue(self, stats: QueueStats) -> None:
        """Queue and ledger were read."""
        self._tell("on_queue", lambda observer: observer.on_queue(stats))

    def on_actors(self, stats: Mapping[str, ActorStats]) -> None:
        """All rollout actors were read."""
        self._tell("on_actors", lambda observer: observer.on_actors(stats))

    def on_evaluation(self, event: EvaluationEvent) -> None:
        """A held-out evaluation ended."""
        self._tell("on_evaluation", lambda observer: observer.on_evaluation(event))

    def on_message(self, level: str, text: str) -> None:
        """Something worth a log line."""
        self._tell("on_message", lambda observer: observer.on_message(level, text))

    def _tell(self, what: str, call: Callable[[Observer], None]) -> None:
        with self._lock:
            for observer in self.active:
                try:
                    call(observer)
                except Exception as error:
                    self._remove(observer, what, error)

    def _remove(self, failed: Observer, what: str, error: Exception) -> None:
        remaining = [observer for observer in self._observers if observer is not failed]
        if len(remaining) == len(self._observers):
            return  # it was removed already, while the failure of another was being reported
        self._observers = remaining
        name = type(failed).__name__
        self.on_message(
            "error",
            f"{name} failed in {what} and is told nothing more: {type(error).__name__}: {error}",
        )
