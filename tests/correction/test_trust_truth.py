"""Every trust mask against its slow truth: plain Python, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.correction.trust_rules import USUAL, TrustBatch, make_trust_batch


class SlowRow:
    """One trajectory as lists of its action tokens."""

    def __init__(self, batch: TrustBatch, row: int) -> None:
        self.places = [t for t, true in enumerate(batch.mask[row].tolist()) if true]
        self.target = [float(batch.target[row, t]) for t in self.places]
        self.behaviour = [float(batch.behaviour[row, t]) for t in self.places]
        self.advantages = [float(batch.advantages[row, t]) for t in self.places]
        self.lag = [int(batch.lag[row, t]) for t in self.places]
        self.logs = [p - q for p, q in zip(self.target, self.behaviour, strict=True)]
        self.k3 = [math.exp(log) - 1 - log for log in self.logs]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def bernoulli_kl(first: float, second: float) -> float:
    p, q = math.exp(first), math.exp(second)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def whole(reject: Callable[[SlowRow], bool]) -> Callable[[SlowRow], list[bool]]:
    return lambda row: [not reject(row)] * len(row.places)


def slow_tv(row: SlowRow) -> list[bool]:
    rises = [math.exp(p) - math.exp(q) for p, q in zip(row.target, row.behaviour, strict=True)]
    return [
        not ((a > 0 and rise > 0.1) or (a < 0 and rise < -0.1))
        for a, rise in zip(row.advantages, rises, strict=True)
    ]


def slow_kl(row: SlowRow) -> list[bool]:
    return [
        not ((p - q) * a > 0 and bernoulli_kl(q, p) > 0.1)
        for a, p, q in zip(row.advantages, row.target, row.behaviour, strict=True)
    ]


def slow_kpop(row: SlowRow) -> list[bool]:
    return [
        max(bernoulli_kl(q, p), bernoulli_kl(p, q)) <= 0.1
        for p, q in zip(row.target, row.behaviour, strict=True)
    ]


SLOW: dict[str, Callable[[SlowRow], list[bool]]] = {
    "lag_token": lambda row: [lag <= 3 for lag in row.lag],
    "lag_trajectory": whole(lambda row: max(row.lag) > 3),
    "geometric_band": whole(lambda row: not 0.7 <= math.exp(mean(row.logs)) <= 1.3),
    "k3_mean": whole(lambda row: mean(row.k3) > 0.1),
    "k3_sum": whole(lambda row: math.fsum(row.k3) > 0.1),
    "k3_max": whole(lambda row: max(row.k3) > 0.1),
    "veto": whole(lambda row: min(map(math.exp, row.logs)) < 0.7),
    "opsm": whole(lambda row: mean(row.advantages) < 0 and -mean(row.logs) > 0.1),
    "dppo_tv": slow_tv,
    "dppo_kl": slow_kl,
    "kpop": slow_kpop,
}


def slow_moment(batch: TrustBatch, limit: float) -> list[list[bool]]:
    """Drop one token after the other, the largest first; no two are equal."""
    squares = batch.logs.square()
    kept = sorted(squares[batch.mask].tolist())
    while len(kept) > 1 and not mean(kept) < limit:
        kept.pop()
    keep = (squares <= kept[-1]) | ~batch.mask
    return [[bool(each) for each in row] for row in keep.tolist()]


def slow_mask(rule: str, batch: TrustBatch) -> list[list[bool]]:
    if rule == "second_moment":
        return slow_moment(batch, 0.2)
    keep = torch.ones_like(batch.mask).tolist()
    for row in range(len(keep)):
        slow = SlowRow(batch, row)
        if slow.places:
            for t, kept in zip(slow.places, SLOW[rule](slow), strict=True):
                keep[row][t] = kept
    return [[bool(each) for each in row] for row in keep]


@pytest.mark.parametrize("rule", USUAL)
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    spread=st.sampled_from([0.1, 0.3, 1.0]),
)
def test_a_mask_is_its_slow_truth(
    rule: str, seed: int, rows: int, columns: int, spread: float
) -> None:
    batch = make_trust_batch(seed, rows, columns, spread)
    assert USUAL[rule](batch).tolist() == slow_mask(rule, batch)
