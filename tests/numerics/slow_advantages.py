"""Advantages from their definitions, in plain Python floats, one step a time.

Deliberately slow, without torch, and in the papers' *sums* where the library uses a recurrence:
it shares nothing with what it checks but the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Row = Sequence[float]


@dataclass(frozen=True)
class SlowSteps:
    """The steps of one row: the places of each, and what the process sees of it."""

    places: list[list[int]]
    rewards: list[float]
    values: list[float]  # one longer: the bootstrap value is last
    ratios: list[float]
    columns: int

    def to_tokens(self, numbers: Row) -> list[float]:
        out = [0.0] * self.columns
        for step, places in enumerate(self.places):
            for t in places:
                out[t] = numbers[step]
        return out


def slow_steps(
    mask: Sequence[bool],
    turns: Sequence[int],
    rewards: Row,
    values: Row,
    bootstrap: float,
    logs: Row,
    unit: str,
) -> SlowSteps:
    """unit: token, turn_product or turn_geometric."""
    places: list[list[int]] = []
    for t in (t for t, true in enumerate(mask) if true):
        if unit != "token" and places and turns[places[-1][-1]] == turns[t]:
            places[-1].append(t)
        else:
            places.append([t])
    log_ratios = [math.fsum(logs[t] for t in step) for step in places]
    if unit == "turn_geometric":
        log_ratios = [log / len(step) for log, step in zip(log_ratios, places, strict=True)]
    return SlowSteps(
        places,
        [math.fsum(rewards[t] for t in step) for step in places],
        [values[step[0]] for step in places] + [bootstrap],
        [math.exp(max(-20.0, min(20.0, log))) for log in log_ratios],
        len(mask),
    )


def slow_gae(steps: SlowSteps, gamma: float, gae_lambda: float) -> tuple[list[float], list[float]]:
    """Advantages and value targets: A_t = sum over k of (gamma lambda)^k delta_(t+k)."""
    count = len(steps.places)
    deltas = [
        steps.rewards[t] + gamma * steps.values[t + 1] - steps.values[t] for t in range(count)
    ]
    advantages = [
        math.fsum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, count))
        for t in range(count)
    ]
    targets = [advantages[t] + steps.values[t] for t in range(count)]
    return steps.to_tokens(advantages), steps.to_tokens(targets)


def slow_vtrace(
    steps: SlowSteps,
    gamma: float,
    trace_lambda: float,
    rho_bar: float,
    c_bar: float,
    pg_rho_bar: float,
) -> tuple[list[float], list[float]]:
    """Value targets and advantages; the sum of equation (1) of arXiv 1802.01561."""
    count, values = len(steps.places), steps.values
    traces = [trace_lambda * min(c_bar, ratio) for ratio in steps.ratios]
    deltas = [
        min(rho_bar, steps.ratios[t]) * (steps.rewards[t] + gamma * values[t + 1] - values[t])
        for t in range(count)
    ]
    targets = [
        values[s]
        + math.fsum(gamma ** (t - s) * math.prod(traces[s:t]) * deltas[t] for t in range(s, count))
        for s in range(count)
    ] + [values[-1]]
    advantages = [
        min(pg_rho_bar, steps.ratios[t]) * (steps.rewards[t] + gamma * targets[t + 1] - values[t])
        for t in range(count)
    ]
    return steps.to_tokens(targets[:-1]), steps.to_tokens(advantages)


def slow_returns(mask: Sequence[bool], rewards: Row, gamma: float) -> list[float]:
    """Discounted returns over action tokens."""
    places = [t for t, true in enumerate(mask) if true]
    out = [0.0] * len(mask)
    for i, t in enumerate(places):
        out[t] = math.fsum(gamma**k * rewards[later] for k, later in enumerate(places[i:]))
    return out


def slow_whitened(
    numbers: Row, counts: Row, recenter: bool, ddof: int, variance_epsilon: float
) -> list[float]:
    """Whitened numbers, each of which stands for a count of places."""
    places = math.fsum(counts)
    mean = math.fsum(n * x for n, x in zip(counts, numbers, strict=True)) / places
    spread = math.fsum(n * (x - mean) ** 2 for n, x in zip(counts, numbers, strict=True))
    deviation = math.sqrt(spread / (places - ddof) + variance_epsilon)
    return [(x - mean if recenter else x) / deviation for x in numbers]


def slow_tail(group: Row) -> list[float]:
    """TailRL as an integral: U_i = G x integral up to r_i of dtau / #{j: r_j > tau}."""
    levels = sorted(set(group))
    utility = []
    for reward in group:
        pieces = [
            (high - low) / sum(r > low for r in group)
            for low, high in pairwise(levels)
            if high <= reward
        ]
        utility.append(len(group) * math.fsum(pieces))
    mean = math.fsum(utility) / len(group)
    return [u - mean for u in utility]


def slow_opob(group: Row, weights: Row, squared_norms: Row) -> list[float]:
    pull = [w * w * g for w, g in zip(weights, squared_norms, strict=True)]
    baseline = math.fsum(k * r for k, r in zip(pull, group, strict=True)) / math.fsum(pull)
    return [r - baseline for r in group]
