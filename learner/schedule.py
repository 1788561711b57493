"""When to broadcast: every k versions, or k from what a broadcast costs and what lag it saves.

Pure: numbers in, a decision out. The costs are those measured in this run.

Model of the adaptive schedule. A broadcast costs c seconds (learner's gather and put, and the
engines' stall, averaged over engines); a step takes t seconds. Broadcasting every k versions costs
the share c / (k t) of the time and adds (k - 1) / 2 versions of lag on average. With a price p,
the share of a step's worth that one version of lag costs, the sum c / (k t) + p (k - 1) / 2 is
least at k* = sqrt(2 c / (p t)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from correction.errors import InputError


class Reason(StrEnum):
    """Why a broadcast is started or left out."""

    DUE = "due"
    """k versions have passed."""
    STARVED = "starved"
    """Engines may start nothing because they are behind."""
    NOT_DUE = "not_due"
    IN_PROGRESS = "in_progress"
    """Every engine is still busy with the last one: two broadcasts never queue up."""
    NOTHING_NEW = "nothing_new"

    @property
    def go(self) -> bool:
        """Whether this is a reason to broadcast."""
        return self in (Reason.DUE, Reason.STARVED)


@dataclass(frozen=True, slots=True)
class Measured:
    """Running means of this run, in seconds. 0 where nothing was measured yet."""

    broadcast_s: float = 0.0
    step_s: float = 0.0

    def with_broadcast(self, seconds: float, weight: float = 0.3) -> Measured:
        """After one more broadcast."""
        return Measured(_blend(self.broadcast_s, seconds, weight), self.step_s)

    def with_step(self, seconds: float, weight: float = 0.3) -> Measured:
        """After one more optimiser step."""
        return Measured(self.broadcast_s, _blend(self.step_s, seconds, weight))


@dataclass(frozen=True, slots=True)
class BroadcastSchedule:
    """The rule. kind: "every" or "adaptive".

    every_versions: k of "every", and the start value of "adaptive".
    most_versions: largest k that the lag bound leaves room for.
    lag_price: p of the module docstring, share of a step per version of lag.
    """

    kind: str = "every"
    every_versions: int = 1
    most_versions: int = 1
    lag_price: float = 0.02

    def __post_init__(self) -> None:
        if self.kind not in ("every", "adaptive"):
            raise InputError(f"broadcast schedule: unknown kind {self.kind!r}")
        if self.every_versions < 1 or self.most_versions < 1 or self.lag_price <= 0:
            raise InputError(f"broadcast schedule out of range: {self}")

    def interval_versions(self, measured: Measured) -> int:
        """k in force now."""
        if self.kind == "every" or not (measured.broadcast_s and measured.step_s):
            return min(self.every_versions, self.most_versions)
        best = math.sqrt(2 * measured.broadcast_s / (self.lag_price * measured.step_s))
        return max(1, min(self.most_versions, round(best)))

    def decide(
        self, *, versions_since: int, in_progress: bool, starved: bool, measured: Measured
    ) -> Reason:
        """Whether to broadcast now.

        versions_since: versions since the last broadcast. in_progress: every engine is busy with
        an earlier one. starved: an engine may start nothing only because it is behind.
        """
        if versions_since <= 0:
            return Reason.NOTHING_NEW
        if in_progress:
            return Reason.IN_PROGRESS
        if versions_since >= self.interval_versions(measured):
            return Reason.DUE
        return Reason.STARVED if starved else Reason.NOT_DUE


def most_versions(max_lag_versions: int, steps_per_batch: int) -> int:
    """Largest broadcast interval at which engines can always start something.

    Just before the next broadcast engines are k - 1 versions behind; a group that starts there
    must still fit the bound on its last pass: k - 1 + steps_per_batch - 1 <= max_lag_versions.
    """
    return max(1, max_lag_versions - (steps_per_batch - 1) + 1)


def _blend(old: float, new: float, weight: float) -> float:
    return new if old == 0.0 else (1 - weight) * old + weight * new
