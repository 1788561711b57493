"""How many groups may be in the pipeline so that policy lag stays within its bound (pure).

Symbols: N = max_lag_versions, B = groups_per_step, U = steps_per_batch (optimiser passes that one
batch serves), v = the learner's step when it takes its next batch, x = the oldest version that
sampled a token of a group.

Batches are taken at v, v+U, v+2U, ... and the last pass over the batch taken at v + jU sees lag
v + jU + (U-1) - x. A group can therefore wait for batches 0 .. j with

    j = floor((N - (U-1) - (v - x)) / U),      none at all if that is negative.

A set of outstanding groups is *feasible* when, taken oldest first, each meets its last batch:
for every x, the number of groups as old as x or older is at most B times the batches they can
wait for (earliest-deadline-first schedulability; EDF is optimal, so no other order does better).

The same rule stands at both gates: a rollout is admitted only if the pipeline stays feasible with
it, and a batch is leased only if what remains, in flight stragglers included, stays feasible
after it. So the bound is kept by pacing, not by discarding, which would favour short episodes.
Worked example: N = 2, B = 4, U = 1, v = 0. Batches at 0, 1, 2 can take groups of version 0: 12
are admitted at once. After one step (v = 1) 8 of them are left with two batches to go: feasible,
and 4 new ones of version 1 fit behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from correction.errors import InputError


@dataclass(frozen=True, slots=True)
class LagBudget:
    """The thresholds: N, B, U of the module docstring."""

    max_lag_versions: int
    groups_per_step: int
    steps_per_batch: int = 1

    def __post_init__(self) -> None:
        if self.max_lag_versions < 0 or self.groups_per_step < 1 or self.steps_per_batch < 1:
            raise InputError(f"lag budget out of range: {self}")
        if self.steps_per_batch - 1 > self.max_lag_versions:
            raise InputError(
                f"{self.steps_per_batch} passes over a batch add up to "
                f"{self.steps_per_batch - 1} versions of lag, more than the bound of "
                f"{self.max_lag_versions}"
            )


def batches_left(budget: LagBudget, learner_step: int, oldest_step: int) -> int:
    """Batches, from the one taken at `learner_step` on, that a group can still be part of.

    0 means that it is too old already. A version from the future is the codec's business and is
    counted as fresh here.
    """
    lag = max(0, learner_step - oldest_step)
    slack = budget.max_lag_versions - (budget.steps_per_batch - 1) - lag
    return slack // budget.steps_per_batch + 1 if slack >= 0 else 0


def trainable(budget: LagBudget, learner_step: int, oldest_step: int) -> bool:
    """Whether a group may be part of the batch taken at `learner_step`: every pass in bound."""
    return batches_left(budget, learner_step, oldest_step) > 0


def feasible(budget: LagBudget, learner_step: int, outstanding: Mapping[int, int]) -> bool:
    """Whether all outstanding groups can be trained in bound.

    outstanding: oldest version (step) -> number of groups, in flight and ready.
    """
    as_old = 0
    for step in sorted(outstanding):
        as_old += outstanding[step]
        if as_old > budget.groups_per_step * batches_left(budget, learner_step, step):
            return False
    return True


def capacity(
    budget: LagBudget, learner_step: int, outstanding: Mapping[int, int], behaviour_step: int
) -> int:
    """Groups that may start now on an engine at `behaviour_step`.

    Adding groups of one version tightens the rule at that version and at every newer one; the
    smallest slack over those is the capacity.
    """
    slack = budget.groups_per_step * batches_left(budget, learner_step, behaviour_step)
    slack -= sum(count for step, count in outstanding.items() if step <= behaviour_step)
    as_old = 0
    for step in sorted(outstanding):
        as_old += outstanding[step]
        if step > behaviour_step:
            room = budget.groups_per_step * batches_left(budget, learner_step, step) - as_old
            slack = min(slack, room)
    return max(0, slack)


def may_lease(budget: LagBudget, learner_step: int, remaining: Mapping[int, int]) -> bool:
    """Whether a batch may be taken at `learner_step`, leaving `remaining` for the next one."""
    return feasible(budget, learner_step + budget.steps_per_batch, remaining)
