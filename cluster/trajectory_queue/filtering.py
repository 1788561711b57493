"""The account of dynamic sampling: what finished groups cost, kept and filtered, and when to stop.

A filtered group leaves room at once, so a fresh task takes its place: the refill needs no code of
its own. A rule that drops everything would then sample for ever. So the groups that the rule
dropped in a row are counted, and after so many of them there is a cause to stop, in words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from actors.trajectory.account import GroupAccount, GroupCosts
from correction.group_filter import GroupOutcome

_VERDICTS = {
    frozenset({GroupOutcome.ALL_WORST}): "the tasks are too hard for this policy",
    frozenset({GroupOutcome.ALL_BEST}): "the tasks are too easy for this policy",
}
_UNDECIDED = "the tasks are too easy or too hard for this policy, or the reward tells too little"


class FilterAccount:
    """Costs by outcome of the groups that were kept and filtered. Groups too small to be judged
    are in neither.

    most_in_a_row: filtered groups without a kept one between them after which `stop_cause` is
    set, for good; 0 for never.
    """

    def __init__(self, most_in_a_row: int = 0) -> None:
        self._most_in_a_row = most_in_a_row
        self._kept: dict[GroupOutcome, GroupCosts] = defaultdict(GroupCosts)
        self._filtered: dict[GroupOutcome, GroupCosts] = defaultdict(GroupCosts)
        self._in_a_row: dict[GroupOutcome, GroupCosts] = defaultdict(GroupCosts)
        self.stop_cause: str | None = None

    def keep(self, account: GroupAccount) -> None:
        """The rule kept this group."""
        self._kept[account.outcome] += account.costs
        self._in_a_row.clear()

    def drop(self, account: GroupAccount) -> None:
        """The rule dropped this group."""
        self._filtered[account.outcome] += account.costs
        self._in_a_row[account.outcome] += account.costs
        in_a_row = sum(costs.groups for costs in self._in_a_row.values())
        if self.stop_cause is None and 0 < self._most_in_a_row <= in_a_row:
            self.stop_cause = _stop_cause(self._in_a_row, in_a_row)

    @property
    def kept(self) -> dict[str, GroupCosts]:
        """Costs of the kept groups by outcome."""
        return {outcome.value: costs for outcome, costs in self._kept.items()}

    @property
    def filtered(self) -> dict[str, GroupCosts]:
        """Costs of the filtered groups by outcome."""
        return {outcome.value: costs for outcome, costs in self._filtered.items()}


def _stop_cause(in_a_row: Mapping[GroupOutcome, GroupCosts], count: int) -> str:
    reward = sum(in_a_row.values(), GroupCosts()).reward_mean
    counts = ", ".join(f"{costs.groups} {outcome}" for outcome, costs in sorted(in_a_row.items()))
    return (
        f"every group of the last {count} had equal rewards ({counts}; mean reward {reward:g}), so "
        f"the group filter dropped all of them: {_VERDICTS.get(frozenset(in_a_row), _UNDECIDED)} "
        "(rollout.max_filtered_in_a_row)"
    )
