"""What describes one Prometheus metric: its type, unit, labels and buckets. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "lagwise_"


class Kind(StrEnum):
    """What Prometheus calls the type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    name: with prefix; counters end in `_total`. labels: names of its labels. known: values of
    its only label that are exported from the start, as 0, so that a rate over them is defined.
    buckets: upper bounds, inclusive, without +Inf. max_series: label sets that are kept;
    any further one is not exported but counted in `lagwise_label_sets_refused_total`.
    """

    name: str
    kind: Kind
    section: str
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    max_series: int = 32


@dataclass(frozen=True, slots=True)
class Section:
    """Builds the metrics of one chapter of the reference."""

    title: str

    def counter(self, name: str, help: str, label: str = "", known: tuple[str, ...] = ()) -> Metric:
        """A count since the start, which never falls. `_total` is added to the name."""
        labels = (label,) if label else ()
        return Metric(f"{PREFIX}{name}_total", Kind.COUNTER, self.title, help, labels, known)

    def gauge(
        self,
        name: str,
        help: str,
        *labels: str,
        known: tuple[str, ...] = (),
        max_series: int = 32,
    ) -> Metric:
        """A value that may rise and fall."""
        return Metric(
            PREFIX + name, Kind.GAUGE, self.title, help, labels, known, max_series=max_series
        )

    def histogram(
        self,
        name: str,
        help: str,
        buckets: tuple[float, ...],
        label: str = "",
        known: tuple[str, ...] = (),
    ) -> Metric:
        """Counts of values by upper bound."""
        labels = (label,) if label else ()
        return Metric(PREFIX + name, Kind.HISTOGRAM, self.title, help, labels, known, buckets)
