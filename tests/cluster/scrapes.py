"""What a scrape of the metrics endpoint gives: every series once, by name and labels."""

from __future__ import annotations

import urllib.request
from http.client import HTTPResponse

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.observing.exporter import MetricsExporter

Labels = tuple[tuple[str, str], ...]
Scrape = dict[tuple[str, Labels], float]


def read(exporter: MetricsExporter) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as reply:
        assert isinstance(reply, HTTPResponse)
        return reply.read().decode()


def scrape(exporter: MetricsExporter) -> Scrape:
    samples: list[Sample] = [
        sample
        for family in text_string_to_metric_families(read(exporter))
        for sample in family.samples
    ]
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples
    }
    assert len(found) == len(samples), "a series appears twice"
    return found


def value(found: Scrape, name: str, **labels: str) -> float:
    return found[f"lagwise_{name}", tuple(sorted(labels.items()))]


def names_of(found: Scrape) -> set[str]:
    return {name for name, _ in found}
