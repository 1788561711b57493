"""Values of the catalogue's metrics, served to prometheus_client as one collector.

prometheus_client's own metric objects observe one value a call and keep label sets for ever.
Here a whole histogram of policy lag is counted in one call, a gauge by replica is replaced as
a whole so that dead replicas vanish, and a scrape sees each event entirely or not at all.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from cluster.observing.metric import Kind, Metric

Labels = tuple[str, ...]
REFUSED = "lagwise_label_sets_refused_total"


@dataclass(slots=True)
class _Buckets:
    """Counts by bucket (not cumulative), the last one for values above every bound."""

    counts: list[int]
    total: float = 0.0


@dataclass(slots=True)
class _Series:
    """All label sets of one metric."""

    values: dict[Labels, float] = field(default_factory=dict)
    histograms: dict[Labels, _Buckets] = field(default_factory=dict)


class MetricStore:
    """Thread-safe values of a catalogue. A name outside of it raises KeyError.

    Label values are given in the order of the metric's `labels`.
    """

    def __init__(self, catalogue: Mapping[str, Metric]) -> None:
        self._catalogue = catalogue
        self._lock = threading.RLock()
        self._series = {name: _seeded(metric) for name, metric in catalogue.items()}

    @contextmanager
    def one_event(self) -> Iterator[None]:
        """No scrape happens inside: what is written together is seen together."""
        with self._lock:
            yield

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Raise a counter. A negative or NaN amount is ignored: counters never fall."""
        with self._lock:
            if amount > 0 and self._admits(name, labels):
                values = self._series[name].values
                values[labels] = values.get(labels, 0.0) + amount

    def raise_to(self, name: str, count: float, *labels: str) -> None:
        """Bring a counter to a count kept elsewhere. A lower count leaves it as it is."""
        with self._lock:
            if self._admits(name, labels):
                values = self._series[name].values
                values[labels] = max(values.get(labels, 0.0), count)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            if self._admits(name, labels):
                self._series[name].values[labels] = value

    def replace(self, name: str, values: Mapping[Labels, float]) -> None:
        """Set all label sets of a gauge; those not given vanish."""
        with self._lock:
            self._series[name].values.clear()
            for labels, value in values.items():
                self.set(name, value, *labels)

    def retain(self, name: str, label_sets: Set[Labels]) -> None:
        """Let all label sets of a gauge vanish but these."""
        with self._lock:
            values = self._series[name].values
            for labels in values.keys() - label_sets:
                del values[labels]

    def observe(
        self, name: str, counts: Mapping[int, int] | Mapping[float, int], *labels: str
    ) -> None:
        """Count each value of `counts` that many times."""
        with self._lock:
            if not self._admits(name, labels):
                return
            metric = self._catalogue[name]
            buckets = self._series[name].histograms.setdefault(labels, _empty(metric))
            for value, count in counts.items():
                buckets.counts[bisect_left(metric.buckets, value)] += count
                buckets.total += value * count

    def describe(self) -> Iterable[Family]:
        """Families without values, by which a registry knows the names."""
        return [
            _histogram_family(metric) if metric.kind is Kind.HISTOGRAM else _scalar_family(metric)
            for metric in self._catalogue.values()
        ]

    def collect(self) -> Iterable[Family]:
        """All values at this instant."""
        with self._lock:
            return [self._collected(metric) for metric in self._catalogue.values()]

    def _admits(self, name: str, labels: Labels) -> bool:
        metric, series = self._catalogue[name], self._series[name]
        if labels in series.values or labels in series.histograms:
            return True
        if len(series.values) + len(series.histograms) < metric.max_series:
            return True
        self.add(REFUSED, 1)
        return False

    def _collected(self, metric: Metric) -> Family:
        series = self._series[metric.name]
        if metric.kind is Kind.HISTOGRAM:
            histogram = _histogram_family(metric)
            for labels, buckets in series.histograms.items():
                histogram.add_metric(labels, _cumulative(metric, buckets), buckets.total)
            return histogram
        scalar = _scalar_family(metric)
        for labels, value in series.values.items():
            scalar.add_metric(labels, value)
        return scalar


def _seeded(metric: Metric) -> _Series:
    label_sets: list[Labels] = [(value,) for value in metric.known]
    if not metric.labels and metric.kind is not Kind.GAUGE:
        label_sets = [()]
    if metric.kind is Kind.HISTOGRAM:
        return _Series(histograms={labels: _empty(metric) for labels in label_sets})
    return _Series(values=dict.fromkeys(label_sets, 0.0))


def _empty(metric: Metric) -> _Buckets:
    return _Buckets([0] * (len(metric.buckets) + 1))


def _scalar_family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    family = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return family(metric.name, metric.help, labels=metric.labels)


def _histogram_family(metric: Metric) -> HistogramMetricFamily:
    return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)


def _cumulative(metric: Metric, buckets: _Buckets) -> list[tuple[str, float]]:
    bounds = [str(float(bound)) for bound in metric.buckets] + ["+Inf"]
    so_far, rows = 0, []
    for bound, count in zip(bounds, buckets.counts, strict=True):
        so_far += count
        rows.append((bound, float(so_far)))
    return rows
