"""Running accounts of a run that more than one observer keeps: fleet totals, reuse, idle time.

Actors come, restart and vanish; their totals never fall. A batch is trained on in passes; its
reuse is counted when it retires. The learner waits and steps; its idle share is of wall time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.observing.events import ActorStats, StepEvent

_NEWBORN = ActorStats(
    actor="",
    state="starting",
    version=None,
    running_groups=0,
    running_requests=0,
    generated_tokens=0,
    idle_s=0.0,
    alive_s=0.0,
    tool_calls=0,
    environment_s=0.0,
    restarts=0,
    full_puts=0,
    identical_groups=0,
)


@dataclass(frozen=True, slots=True)
class ActorTotals:
    """Sums over all rollout actors since the run began, living or gone."""

    generated_tokens: int = 0
    idle_s: float = 0.0
    alive_s: float = 0.0
    environment_s: float = 0.0
    tool_calls: int = 0
    restarts: int = 0
    full_puts: int = 0
    identical_groups: int = 0

    @property
    def idle_share(self) -> float | None:
        """Share of the actors' lives with no group running; None before any life."""
        return self.idle_s / self.alive_s if self.alive_s > 0 else None


class ActorAccount:
    """Turns readings of actors into totals.

    Each reading counts from the start of its actor. A restarted actor starts again at 0, a
    vanished one is simply absent; what either did before stays in the totals. What an actor did
    between its last reading and its death is in no reading and is not counted.
    """

    def __init__(self) -> None:
        self._last: dict[str, ActorStats] = {}
        self.totals = ActorTotals()

    def update(self, stats: Mapping[str, ActorStats]) -> ActorTotals:
        """Add what is new in a reading of the whole fleet."""
        for name, now in stats.items():
            before = self._last.get(name)
            self.totals = _advance(self.totals, before, now)
            self._last[name] = now
        return self.totals


def _advance(totals: ActorTotals, before: ActorStats | None, now: ActorStats) -> ActorTotals:
    restarts_before = before.restarts if before else 0
    since = before if before and _same_incarnation(before, now) else _NEWBORN
    return ActorTotals(
        totals.generated_tokens + max(0, now.generated_tokens - since.generated_tokens),
        totals.idle_s + max(0.0, now.idle_s - since.idle_s),
        totals.alive_s + max(0.0, now.alive_s - since.alive_s),
        totals.environment_s + max(0.0, now.environment_s - since.environment_s),
        totals.tool_calls + max(0, now.tool_calls - since.tool_calls),
        totals.restarts + max(0, now.restarts - restarts_before),
        totals.full_puts + max(0, now.full_puts - since.full_puts),
        totals.identical_groups + max(0, now.identical_groups - since.identical_groups),
    )


def _same_incarnation(before: ActorStats, now: ActorStats) -> bool:
    return now.restarts == before.restarts and now.alive_s >= before.alive_s


@dataclass(frozen=True, slots=True)
class Retired:
    """A batch that will not be trained on again: its trajectories, and the passes each served."""

    trajectories: int
    passes: int


class ReuseAccount:
    """Passes that each trajectory has served, counted when its batch retires.

    A batch retires with its last pass, or when another batch begins before that (its passes were
    cut short). Only applied passes count: a refused step taught nothing.

    served: passes -> how many retired trajectories had served that many.
    """

    def __init__(self) -> None:
        self.served: Counter[int] = Counter()
        self._open: Retired | None = None

    def on_step(self, event: StepEvent) -> tuple[Retired, ...]:
        """The batches that retired with this step: none, one or two."""
        cut_short = self._retire() if event.reuse_pass == 1 else ()
        passes = (self._open.passes if self._open else 0) + int(event.applied)
        self._open = Retired(event.trajectories, passes)
        return cut_short + (self._retire() if event.reuse_pass >= event.passes else ())

    def served_so_far(self) -> Counter[int]:
        """`served`, and the batch in work as if it retired now."""
        if self._open is None:
            return Counter(self.served)
        return self.served + Counter({self._open.passes: self._open.trajectories})

    def _retire(self) -> tuple[Retired, ...]:
        if self._open is None:
            return ()
        retired, self._open = self._open, None
        self.served[retired.passes] += retired.trajectories
        return (retired,)


class LearnerClock:
    """The learner's idle share, against one clock.

    Generation overlaps with both waiting and stepping, so the share is of the wall time since the
    learner first asked for data, never of a sum over components.
    """

    def __init__(self) -> None:
        self._asked_at_s: float | None = None
        self._until_s = 0.0
        self.wait_s = 0.0
        self.busy_s = 0.0

    def on_step(self, event: StepEvent) -> None:
        """Count one step; its `at_s` is the moment at which it ended."""
        self.wait_s += event.wait_s
        self.busy_s += event.step_s
        if self._asked_at_s is None:
            self._asked_at_s = event.at_s - event.step_s - event.wait_s
        self._until_s = max(self._until_s, event.at_s)

    @property
    def idle_share(self) -> float | None:
        """Share of the time since it first asked for data that it waited; None before."""
        if self._asked_at_s is None:
            return None
        # A jump of the clock must not make a share above 1.
        span_s = max(self._until_s - self._asked_at_s, self.wait_s + self.busy_s)
        return self.wait_s / span_s if span_s > 0 else None
