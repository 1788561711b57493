"""Table, sentences, plot and page of the lag ablation."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks._ablation_page import (
    HEAD,
    MARK,
    PAGE,
    Spread,
    findings_of,
    page_below,
    rows_of,
    table_of,
    write_page,
)
from benchmarks._ablation_plot import plot
from tests.benchmarks.ablation_outcomes import made

OUTCOMES = [
    made(method="none", lag=0, success=0.9),
    made(method="none", lag=8, success=0.2),
    made(method="none", lag=8, seed=18, success=None, stopped="not finite"),
    made(method="tis", lag=0, success=0.9),
    made(method="tis", lag=8, success=0.6),
    made(method="tis", lag=8, seed=18, success=0.8),
]


def test_rows_are_over_seeds_by_lag_then_method() -> None:
    rows = rows_of(OUTCOMES)
    assert [(row.lag, row.method, row.runs, row.collapsed) for row in rows] == [
        (0, "none", 1, 0),
        (0, "tis", 1, 0),
        (8, "none", 2, 2),
        (8, "tis", 2, 0),
    ]
    assert rows[3].success == Spread((0.6 + 0.8) / 2, 0.6, 0.8)
    assert rows[2].success == Spread(0.2, 0.2, 0.2)


def test_the_table_tells_mean_range_and_collapses() -> None:
    head, rule, *lines = table_of(rows_of(OUTCOMES)).splitlines()
    assert head.count("|") == rule.count("|") == len(HEAD) + 1
    assert all(line.count("|") == len(HEAD) + 1 for line in lines)
    assert lines[3].startswith("| 7.2 | 8 | `tis` | 0.70 (0.60 to 0.80) |")
    assert "| 2 of 2 |" in lines[2]


def test_what_nobody_observed_is_a_dash() -> None:
    (row,) = rows_of([made(success=None, stopped="not finite")])
    assert "| `tis` | - | - | 1 of 1 |" in table_of([row])


def test_a_sentence_a_lag() -> None:
    first, second = findings_of(rows_of(OUTCOMES)).splitlines()
    assert first.endswith("collapsed: none.")
    assert second == (
        "- Lag 7.2 (wanted 8): highest `tis` 0.70, lowest `none` 0.20; collapsed: `none` 2 of 2."
    )


def test_missing_runs_are_said() -> None:
    assert "**3 runs of the grid are missing.**" in page_below(OUTCOMES, missing=3)
    assert "missing" not in page_below(OUTCOMES, missing=0)


def test_the_page_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"by hand\n\n{MARK}\n\nold figures\n")
    write_page(OUTCOMES, 0, page)
    text = page.read_text()
    assert text.startswith(f"by hand\n\n{MARK}\n\n6 runs of 60 steps, seeds 17, 18")
    assert "old figures" not in text
    write_page(OUTCOMES, 0, page)
    assert page.read_text() == text


def test_a_page_without_the_mark_is_not_overwritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("by hand\n")
    with pytest.raises(ValueError, match="has no line"):
        write_page(OUTCOMES, 0, page)
    assert page.read_text() == "by hand\n"


def test_the_real_page_has_the_mark() -> None:
    assert PAGE.read_text(encoding="utf-8").count(MARK) == 1


def test_the_same_rows_give_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "a.svg", tmp_path / "deep" / "b.svg"
    for path in (first, second):
        plot(rows_of(OUTCOMES), 0.5, path)
    assert first.read_bytes() == second.read_bytes()
    texts = {element.text for element in ElementTree.parse(first).iter() if element.text}
    assert {"none", "tis", "held-out success", "share of runs collapsed"} <= texts
