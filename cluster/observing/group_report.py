"""Filtered groups against kept ones, in each form in which a run tells it.

Dropping is biased: whoever filters must be able to see what was dropped beside what was kept, in
length, reward, truncation and time (design, section 4, rule 10).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from actors.trajectory.account import GroupCosts
from cluster.observing.events import QueueStats
from cluster.observing.metric import PREFIX, Metric, Section
from correction.group_filter import GroupOutcome

_OUTCOMES = tuple(outcome.value for outcome in GroupOutcome)
_FATES = {
    "kept": ("kept", _OUTCOMES),
    "filtered": (
        "dropped by the group filter",
        tuple(name for name in _OUTCOMES if name != GroupOutcome.MIXED),
    ),
}
_COUNTS = {
    "groups": ("groups", "Groups"),
    "group_trajectories": ("trajectories", "Trajectories in groups"),
    "group_truncated": ("truncated", "Truncated trajectories in groups"),
    "group_tokens": ("tokens", "Action tokens of groups"),
    "group_generation_seconds": ("generation_s", "Engine time, summed over siblings, of groups"),
    "group_environment_seconds": ("environment_s", "Environment time of groups"),
}
_section = Section("Group filter")

METRICS: tuple[Metric, ...] = (
    *(
        _section.counter(
            f"{fate}_{name}", f"{what} {words}, by how their rewards lie.", "outcome", known
        )
        for fate, (words, known) in _FATES.items()
        for name, (_, what) in _COUNTS.items()
    ),
    _section.gauge("group_reward_mean", "Mean reward of all trajectories so far.", "fate"),
    _section.gauge("filtered_tokens_ratio", "Share of filtered tokens in those generated."),
)


def filtered_tokens_ratio(stats: QueueStats) -> float | None:
    """Share of the generated tokens that the group filter dropped; None before any token."""
    tokens = _total(stats.filtered).tokens
    return tokens / stats.tokens.issued if stats.tokens.issued else None


def counters(stats: QueueStats) -> Iterator[tuple[str, float, str]]:
    """Name, count and outcome of every counter of `METRICS` that has a value."""
    for fate in _FATES:
        for outcome, costs in _by_outcome(stats, fate).items():
            for name, (field, _) in _COUNTS.items():
                yield f"{PREFIX}{fate}_{name}_total", getattr(costs, field), outcome


def reward_means(stats: QueueStats) -> dict[tuple[str, ...], float]:
    """Mean reward by fate, of those that have one."""
    means = {(fate,): _total(_by_outcome(stats, fate)).reward_mean for fate in _FATES}
    return {fate: mean for fate, mean in means.items() if mean is not None}


def group_summary(stats: QueueStats | None) -> dict[str, object]:
    """The part of summary.json; None: the queue was never read."""
    if stats is None:
        return {"filtered_tokens_ratio": None, **{fate: {} for fate in _FATES}}
    return {
        "filtered_tokens_ratio": filtered_tokens_ratio(stats),
        **{fate: _summaries(_by_outcome(stats, fate)) for fate in _FATES},
    }


def told_filtering(stats: QueueStats) -> str:
    """What the group filter dropped, in words; empty where it dropped nothing."""
    filtered, kept = _total(stats.filtered).groups, _total(stats.kept).groups
    if filtered == 0:
        return ""
    counts = ", ".join(f"{costs.groups} {name}" for name, costs in sorted(stats.filtered.items()))
    return f"the group filter dropped {filtered} of {filtered + kept} groups ({counts})"


def _by_outcome(stats: QueueStats, fate: str) -> Mapping[str, GroupCosts]:
    return stats.kept if fate == "kept" else stats.filtered


def _total(by_outcome: Mapping[str, GroupCosts]) -> GroupCosts:
    return sum(by_outcome.values(), GroupCosts())


def _summaries(by_outcome: Mapping[str, GroupCosts]) -> dict[str, object]:
    return {outcome: _summary(costs) for outcome, costs in sorted(by_outcome.items())}


def _summary(costs: GroupCosts) -> dict[str, object]:
    return {
        "groups": costs.groups,
        "trajectories": costs.trajectories,
        "truncated": costs.truncated,
        "tokens": costs.tokens,
        "tokens_mean": costs.tokens_mean,
        "reward_mean": costs.reward_mean,
        "generation_s": costs.generation_s,
        "environment_s": costs.environment_s,
    }
