"""The catalogue and its series: bounded, cheap to scrape, named by the conventions, documented."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator

import pytest

from cluster.observing.diagnostic_metrics import PLACES
from cluster.observing.exporter import MetricsExporter
from cluster.observing.metric import Kind
from cluster.observing.metric_store import REFUSED, MetricStore
from cluster.observing.metrics_catalogue import (
    BROADCAST_PHASES,
    CATALOGUE,
    REFERENCE_PATH,
    reference,
)
from tests.cluster.made_events import (
    make_actor,
    make_broadcast,
    make_evaluation,
    make_queue,
    make_step,
)
from tests.cluster.scrapes import scrape, value


@pytest.fixture
def exporter() -> Iterator[MetricsExporter]:
    exporter = MetricsExporter(unix_time=lambda: 1000.0)
    yield exporter
    exporter.close()


def _fill(exporter: MetricsExporter, replicas: int) -> None:
    names = [f"actor-{number}" for number in range(replicas)]
    parts = {f"part-{number}": 0.1 for number in range(100)}
    exporter.on_step(make_step(1, metrics=dict.fromkeys(PLACES, 0.5), reward_parts=parts))
    for name in names:
        phases = dict.fromkeys(BROADCAST_PHASES, 0.1)
        exporter.on_broadcast(make_broadcast(name, phases_s=phases))
    exporter.on_queue(make_queue(rejected={f"reason-{number}": 1 for number in range(100)}))
    exporter.on_actors({name: make_actor(name) for name in names})
    exporter.on_evaluation(make_evaluation())


def test_series_stay_bounded_with_64_replicas_and_unbounded_names(
    exporter: MetricsExporter,
) -> None:
    _fill(exporter, 64)
    found = scrape(exporter)
    print(f"{len(found)} series with 64 replicas")
    assert len(found) <= 1500
    assert value(found, "label_sets_refused_total") == 2 * (100 - 32)


def test_a_scrape_costs_no_more_a_series_than_the_client_library_itself(
    exporter: MetricsExporter,
) -> None:
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    _fill(exporter, 64)
    count = len(scrape(exporter))
    registry = CollectorRegistry()
    plain = Gauge("plain", "As many series in the library's own gauge.", ["n"], registry=registry)
    for number in range(count):
        plain.labels(str(number)).set(number)
    ours, theirs = CollectorRegistry(), registry
    ours.register(exporter._store)
    spent: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(9):  # alternating, so that both see the same machine
        for name, source in (("ours", ours), ("theirs", theirs)):
            began = time.perf_counter()
            generate_latest(source)
            spent[name].append(time.perf_counter() - began)
    ratio = statistics.median(spent["ours"]) / statistics.median(spent["theirs"])
    print(f"{count} series, {1000 * statistics.median(spent['ours']):.1f} ms, ratio {ratio:.2f}")
    assert ratio < 2


def test_store_refuses_what_is_not_in_the_catalogue() -> None:
    with pytest.raises(KeyError):
        MetricStore(CATALOGUE).add("lagwise_made_up_total", 1)


def test_store_ignores_amounts_that_would_make_a_counter_fall() -> None:
    store = MetricStore(CATALOGUE)
    store.add(REFUSED, 2)
    store.add(REFUSED, -1)
    store.add(REFUSED, float("nan"))
    store.raise_to(REFUSED, 1)
    totals = [
        family.samples[0].value for family in store.collect() if REFUSED.startswith(family.name)
    ]
    assert totals == [2]


def test_names_follow_the_conventions() -> None:
    for metric in CATALOGUE.values():
        assert re.fullmatch("lagwise_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not metric.known or len(metric.labels) == 1
        assert not {"version", "trajectory", "group", "job", "instance"} & set(metric.labels) or (
            metric.name == "lagwise_build_info"
        )


def test_the_reference_in_docs_is_up_to_date() -> None:
    assert REFERENCE_PATH.read_text(encoding="utf-8") == reference(), (
        "run: python -m cluster.observing.metrics_catalogue"
    )
