"""What the terminal views show, kept from the events of a run. No drawing, no terminal."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.observing import distributions
from cluster.observing.accounts import ActorAccount, LearnerClock, ReuseAccount
from cluster.observing.diagnostic_metrics import (
    ENTROPY,
    ESS_BOUNDED,
    ESS_RAW,
    KL_REFERENCE,
    REJECTED,
    REJECTED_BY_RULE,
    VALUE_ERROR_SQUARED,
)
from cluster.observing.events import (
    ActorStats,
    BroadcastEvent,
    EvaluationEvent,
    QueueStats,
    StepEvent,
)

Clock = Callable[[], float]
RATE_WINDOW_S = 15.0
RECENT_STEPS = 16


@dataclass(frozen=True, slots=True)
class Message:
    """A log message as shown: one line, printable."""

    at_s: float
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Several steps as one, pooled over their trajectories and tokens. None: nothing measured.

    rejected: share of tokens; None also where no rule could reject one. kl_reference, entropy:
    nats a token. critic_error: root mean square, in units of reward.
    """

    steps: int
    reward: float | None
    lag_tokens: Mapping[int, int]
    lag_mean: float | None
    lag_max: int | None
    ess_raw: float | None
    ess_bounded: float | None
    rejected: float | None
    kl_reference: float | None
    entropy: float | None
    critic_error: float | None

    @classmethod
    def of(cls, events: Iterable[StepEvent]) -> StepSpan:
        """Pool the applied ones of `events`."""
        applied = [event for event in events if event.applied]
        lag_tokens = distributions.pool(event.lag_tokens for event in applied)
        oldest = distributions.pool(event.lag_trajectories for event in applied)
        return cls(
            steps=len(applied),
            reward=_weighted((event.reward_mean, event.trajectories) for event in applied),
            lag_tokens=lag_tokens,
            lag_mean=distributions.mean(lag_tokens),
            lag_max=distributions.largest(oldest),
            ess_raw=_diagnostic(applied, ESS_RAW),
            ess_bounded=_diagnostic(applied, ESS_BOUNDED),
            rejected=_rejected(applied),
            kl_reference=_diagnostic(applied, KL_REFERENCE),
            entropy=_diagnostic(applied, ENTROPY),
            critic_error=_root(_diagnostic(applied, VALUE_ERROR_SQUARED)),
        )

    def of_recipe(self) -> list[tuple[str, str]]:
        """Names and texts of what not every recipe has, as far as this one has it."""
        percent = None if self.rejected is None else 100 * self.rejected
        texts = (
            ("rejected", percent, ".1f", " %"),
            ("kl ref", self.kl_reference, ".3g", ""),
            ("entropy", self.entropy, ".2f", ""),
            ("critic err", self.critic_error, ".2g", ""),
        )
        return [(name, f"{v:{form}}{unit}") for name, v, form, unit in texts if v is not None]


class ViewState:
    """Observer that keeps the recent past. total_steps: policy version at which the run ends.

    clock: seconds, monotonic.
    """

    def __init__(self, *, total_steps: int, clock: Clock) -> None:
        self.total_steps = total_steps
        self.clock = clock
        self.began_at_s = clock()
        self.step: StepEvent | None = None
        self.steps_seen = 0
        self.rewards: deque[float] = deque(maxlen=512)
        self.recent: deque[StepEvent] = deque(maxlen=RECENT_STEPS)
        self.reuse = ReuseAccount()
        self.learner = LearnerClock()
        self.queue: QueueStats | None = None
        self.actors: Mapping[str, ActorStats] = {}
        self.fleet = ActorAccount()
        self.swaps: deque[BroadcastEvent] = deque(maxlen=32)
        self.outcomes: Counter[str] = Counter()
        self.evaluations: list[EvaluationEvent] = []
        self.messages: deque[Message] = deque(maxlen=3)
        self._sampled: deque[tuple[float, int]] = deque()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this view began."""
        return self.clock() - self.began_at_s

    @property
    def policy_version(self) -> int:
        """Optimiser steps applied to the weights, as far as seen."""
        return self.step.version.step if self.step else 0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that the whole fleet sampled in a second of wall time, lately."""
        if len(self._sampled) < 2:
            return None
        (start_s, before), (end_s, now) = self._sampled[0], self._sampled[-1]
        return (now - before) / (end_s - start_s) if end_s > start_s else None

    def on_step(self, event: StepEvent) -> None:
        """Keep the step."""
        self.step = event
        self.steps_seen += 1
        self.reuse.on_step(event)
        self.learner.on_step(event)
        self.recent.append(event)
        if event.applied:
            self.rewards.append(event.reward_mean)

    def on_broadcast(self, event: BroadcastEvent) -> None:
        """Keep what engines reported."""
        self.outcomes[event.outcome] += 1
        if event.outcome == "swapped":
            self.swaps.append(event)

    def on_queue(self, stats: QueueStats) -> None:
        """Keep the last reading."""
        self.queue = stats

    def on_actors(self, stats: Mapping[str, ActorStats]) -> None:
        """Keep the last reading and the rate of sampling."""
        self.actors = dict(stats)
        now_s = self.clock()
        self._sampled.append((now_s, self.fleet.update(stats).generated_tokens))
        while len(self._sampled) > 2 and self._sampled[1][0] < now_s - RATE_WINDOW_S:
            self._sampled.popleft()

    def on_evaluation(self, event: EvaluationEvent) -> None:
        """Keep the evaluation."""
        self.evaluations.append(event)

    def on_message(self, level: str, text: str) -> None:
        """Keep the message."""
        self.messages.append(Message(self.elapsed_s, level, printable(text)))


def printable(text: str) -> str:
    """`text` on one line without control characters: it may come from a model or a tool."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _diagnostic(events: Iterable[StepEvent], name: str) -> float | None:
    return _weighted(
        (event.metrics[name], event.action_tokens) for event in events if name in event.metrics
    )


def _rejected(events: Sequence[StepEvent]) -> float | None:
    """Share of rejected tokens; None where none was, and no trust mask could have."""
    masked = any(REJECTED_BY_RULE.keys() & event.metrics.keys() for event in events)
    share = _diagnostic(events, REJECTED)
    return share if masked or share else None


def _root(square: float | None) -> float | None:
    return None if square is None else math.sqrt(square)


def _weighted(values: Iterable[tuple[float, int]]) -> float | None:
    pairs = list(values)
    weight = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / weight if weight else None
