"""Exact statistics: of integer histograms (policy lag, reuse), and of durations.

A histogram maps a value to how often it occurred. Pooling adds counts, so that a mean over many
steps is never a mean of means. Durations are kept one by one up to a limit; beyond it those kept
are a uniform random choice of all that came (algorithm R, Vitter 1985, ACM TOMS 11:1), drawn from
a seeded generator, so that a repeated run reports the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

Histogram = Mapping[int, int]


def pool(histograms: Iterable[Histogram]) -> Counter[int]:
    """One histogram of everything that the given ones counted."""
    pooled: Counter[int] = Counter()
    for histogram in histograms:
        for value, count in histogram.items():
            if count > 0:
                pooled[value] += count
    return pooled


def mean(histogram: Histogram) -> float | None:
    """Mean value; None where nothing was counted, which is not the same as 0."""
    total = sum(histogram.values())
    if total == 0:
        return None
    return sum(value * count for value, count in histogram.items()) / total


def largest(histogram: Histogram) -> int | None:
    """Largest value that occurred; None where nothing was counted."""
    return max((value for value, count in histogram.items() if count > 0), default=None)


def percentile(histogram: Histogram, percent: int) -> int | None:
    """Nearest-rank percentile: the smallest value that `percent` % of all do not exceed.

    It is a value that occurred. None where nothing was counted. percent: 1 to 100.
    """
    total = sum(histogram.values())
    rank = -(-percent * total // 100)
    for value in sorted(histogram):
        rank -= histogram[value]
        if rank <= 0 and histogram[value] > 0:
            return value
    return None


class Quantiles:
    """Values of one quantity; memory is bounded by `limit` floats."""

    def __init__(self, limit: int = 10_000, seed: int = 0) -> None:
        self._limit = limit
        self._random = random.Random(seed)
        self._kept: list[float] = []
        self._seen = 0
        self._largest: float | None = None

    def add(self, value: float) -> None:
        """Count one value."""
        self._seen += 1
        self._largest = value if self._largest is None else max(self._largest, value)
        if len(self._kept) < self._limit:
            self._kept.append(value)
            return
        place = self._random.randrange(self._seen)
        if place < self._limit:
            self._kept[place] = value

    @property
    def count(self) -> int:
        """How many values came, kept or not."""
        return self._seen

    @property
    def largest(self) -> float | None:
        """Largest value that ever came, exact; None where none did."""
        return self._largest

    def percentile(self, percent: int) -> float | None:
        """Nearest-rank percentile of the kept values; None where there are none.

        percent: 1 to 100.
        """
        if not self._kept:
            return None
        rank = -(-percent * len(self._kept) // 100)
        return sorted(self._kept)[rank - 1]
