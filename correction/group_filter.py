"""Which groups are worth training on: dynamic sampling. Stdlib only, decided where rewards appear.

A group whose rewards are all equal has advantage 0 under every group baseline: it costs a forward
and a backward pass, dilutes the denominators of the loss, and teaches nothing. DAPO (arXiv
2503.14476, section 3.2) trains only on groups with 0 < accuracy < 1 and samples on until the batch
is full of them. The rollouts that are dropped for it are a cost of the method and are counted.

    rule           keeps a group
    none           always
    mixed_rewards  unless its rewards are all exactly equal; for rewards 0 and 1: 0 < accuracy < 1

Equality is that of the rewards as the environment gave them, before any shaping or penalty. Never
of their deviation: the mean of three times 0.1 is not 0.1 in floating point, so that a deviation
of a group of equal rewards may be above 0. A group is kept or dropped whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from correction.errors import InputError

BEST_REWARD = 1.0
WORST_REWARD = 0.0
"""Success and failure of environments whose reward is a score; used to name, not to decide."""


class GroupFilter(StrEnum):
    """Rule by which finished groups are kept. Meaning: module docstring."""

    NONE = "none"
    MIXED_REWARDS = "mixed_rewards"


class GroupOutcome(StrEnum):
    """How the rewards of a group lie. Bounded: these are metric labels."""

    MIXED = "mixed"
    """Not all equal."""
    ALL_BEST = "all_best"
    """All equal, at least `BEST_REWARD`: the task is too easy by now."""
    ALL_WORST = "all_worst"
    """All equal, at most `WORST_REWARD`: the task is too hard still."""
    EQUAL = "equal"
    """All equal, in between."""


def keep_group(rewards: Sequence[float], rule: GroupFilter) -> bool:
    """Whether the rule keeps a group with these rewards of its surviving members.

    Raises InputError where there is no reward or one that is not finite.
    """
    outcome = group_outcome(rewards)
    return rule is GroupFilter.NONE or outcome is GroupOutcome.MIXED


def group_outcome(rewards: Sequence[float]) -> GroupOutcome:
    """How the rewards of a group lie. Raises InputError as `keep_group` does."""
    if not rewards or not all(math.isfinite(reward) for reward in rewards):
        raise InputError(f"rewards: expected at least one, all finite, got {list(rewards)}")
    lowest, highest = min(rewards), max(rewards)
    if lowest != highest:
        return GroupOutcome.MIXED
    if lowest >= BEST_REWARD:
        return GroupOutcome.ALL_BEST
    return GroupOutcome.ALL_WORST if highest <= WORST_REWARD else GroupOutcome.EQUAL
