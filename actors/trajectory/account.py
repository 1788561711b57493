"""What groups cost and how they came out, without their tokens.

A group that the filter of the recipe drops (`correction/group_filter.py`) has cost as much as one
that it keeps. Its tokens need not travel, but its account must: it is what the ledger counts and
what dropped groups are compared with kept ones by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from correction.errors import TrajectoryError
from correction.group_filter import GroupOutcome

_MOST = 2**53
"""Largest integer that every JSON reader keeps exact."""


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """Sums over the surviving trajectories of one group, or of several.

    truncated: trajectories that were cut, not finished. tokens: sampled ones. reward_sum: finite.
    generation_s, environment_s: seconds in the engine and in the environment; siblings run at
    once, so these are more than wall time.
    """

    groups: int = 0
    trajectories: int = 0
    truncated: int = 0
    tokens: int = 0
    reward_sum: float = 0.0
    generation_s: float = 0.0
    environment_s: float = 0.0

    def __add__(self, other: GroupCosts) -> GroupCosts:
        return GroupCosts(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of a trajectory; None where there is none."""
        return self.reward_sum / self.trajectories if self.trajectories else None

    @property
    def tokens_mean(self) -> float | None:
        """Mean sampled tokens of a trajectory; None where there is none."""
        return self.tokens / self.trajectories if self.trajectories else None


_NAMES = tuple(field.name for field in fields(GroupCosts))


@dataclass(frozen=True, slots=True)
class GroupAccount:
    """One group: how its rewards lie, and what its survivors cost."""

    outcome: GroupOutcome
    costs: GroupCosts


def account_fields(account: GroupAccount) -> dict[str, object]:
    """The account as JSON fields; `read_account` is the inverse."""
    costs = {name: getattr(account.costs, name) for name in _NAMES}
    return {"outcome": account.outcome.value, **costs}


def read_account(value: object) -> GroupAccount:
    """An account from what JSON gave. Raises TrajectoryError "bad_group" for anything else."""
    if not isinstance(value, Mapping) or value.keys() != {"outcome", *_NAMES}:
        raise TrajectoryError("bad_group", "the account of a group has other fields")
    if value["outcome"] not in list(GroupOutcome):
        raise TrajectoryError("bad_group", f"outcome {value['outcome']!r:.40}")
    costs = GroupCosts(
        groups=_count(value["groups"]),
        trajectories=_count(value["trajectories"]),
        truncated=_count(value["truncated"]),
        tokens=_count(value["tokens"]),
        reward_sum=_number(value["reward_sum"]),
        generation_s=_seconds(value["generation_s"]),
        environment_s=_seconds(value["environment_s"]),
    )
    if costs.groups != 1 or not 0 <= costs.truncated <= costs.trajectories:
        raise TrajectoryError("bad_group", f"no account of one group: {costs}")
    return GroupAccount(GroupOutcome(value["outcome"]), costs)


def _count(value: Any) -> int:  # noqa: ANN401  (whatever JSON gave)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise TrajectoryError("bad_group", f"count {value!r:.40}")
    return value


def _number(value: Any) -> float:  # noqa: ANN401
    if type(value) is not float or not math.isfinite(value):
        raise TrajectoryError("bad_group", f"number {value!r:.40}")
    return value


def _seconds(value: Any) -> float:  # noqa: ANN401
    if _number(value) < 0:
        raise TrajectoryError("bad_group", f"seconds {value!r:.40}")
    return float(value)
