"""What a run of the lag ablation came to, the rule of collapse, and going on after a stop."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks._ablation_cells import (
    Outcome,
    OutcomeFile,
    collapsed,
    outcome_of,
    start_successes,
    token_mean,
    training_s,
)
from tests.benchmarks.ablation_outcomes import made

PROVENANCE = {"commit": "abc", "machine": "m", "load": 0.5}


def summary(**changes: object) -> dict[str, Any]:
    ended = {"success": 0.7, "high": 0.76}
    return {
        "status": "done",
        "reason": "max_steps",
        "first_cause": None,
        "steps": 60,
        "wall_s": 41.0,
        "reward": {"first": 0.5, "last": 0.75, "best": 0.8},
        "policy_lag": {"mean": 3.9, "max": 6},
        "ess_ratio": {"raw": 0.9, "bounded": 0.95},
        "trajectories": {"dropped": {"deadline": 2}},
        "evaluation": [
            {"policy_version": 0, "success": 0.5, "high": 0.57},
            {"policy_version": 60, **ended},
        ],
        **changes,
    }


def step(
    at_s: float, tokens: int, metrics: dict[str, float | None], *, applied: bool = True
) -> dict[str, Any]:
    return {
        "at_s": at_s,
        "step_s": 0.5,
        "wait_s": 0.25,
        "action_tokens": tokens,
        "applied": applied,
        "metrics": metrics,
    }


def test_an_outcome_holds_what_the_run_said() -> None:
    steps = [
        step(1.0, 100, {"clip_fraction_low_positive": 0.1, "clip_fraction_high_negative": 0.1}),
        step(2.0, 300, {"clip_fraction_low_positive": 0.0, "weight_changed_fraction": 0.4}),
        step(3.0, 900, {"clip_fraction_low_positive": 1.0}, applied=False),
    ]
    outcome = outcome_of(made().cell, summary(), steps, PROVENANCE)
    assert (outcome.start_success, outcome.success, outcome.success_high) == (0.5, 0.7, 0.76)
    assert outcome.clipped == pytest.approx(0.05)
    assert outcome.bounded == pytest.approx(0.4)
    assert outcome.training_s == pytest.approx(2.75)
    assert (outcome.dropped, outcome.stopped) == ({"deadline": 2}, None)


def test_figures_by_lag_are_not_counted_again() -> None:
    steps = [
        step(1.0, 10, {"clip_fraction_low_positive": 0.2, "clip_fraction_low_positive@lag=1": 0.9})
    ]
    assert outcome_of(made().cell, summary(), steps, PROVENANCE).clipped == pytest.approx(0.2)


def test_what_was_not_observed_is_none() -> None:
    assert token_mean([], lambda name: True) is None
    assert token_mean([step(1.0, 10, {"x": None})], lambda name: True) is None
    assert training_s([]) is None


def test_a_stop_for_something_not_finite_is_an_outcome() -> None:
    cause = "RunError: 4 optimiser steps in a row were refused: the gradient is not finite"
    failed = summary(status="failed", reason="error", first_cause=cause, steps=9, evaluation=[])
    outcome = outcome_of(made().cell, failed, [], PROVENANCE)
    assert (outcome.stopped, outcome.success) == (cause, None)
    assert collapsed(outcome, 0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "failed", "first_cause": "interrupted before its orderly end"},
        {"status": "failed", "first_cause": "EngineError: the engine died"},
        {"reason": "SIGINT"},
    ],
)
def test_any_other_early_end_is_no_outcome(changes: dict[str, object]) -> None:
    with pytest.raises(RuntimeError):
        outcome_of(made().cell, summary(**changes), [], PROVENANCE)


@pytest.mark.parametrize(
    ("success", "start", "expected"),
    [
        (0.44, 0.5, True),
        (0.46, 0.5, False),
        (0.9, 0.5, False),
        (None, 0.5, False),
        (0.1, None, False),
    ],
)
def test_collapse_is_beyond_doubt_below_the_start(
    success: float | None, start: float | None, expected: bool
) -> None:
    assert collapsed(made(success=success), start) is expected


def test_the_start_is_the_mean_over_all_runs_of_a_seed() -> None:
    outcomes = [made(start=0.4), made(start=0.6, lag=8), made(start=0.7, seed=18), made(start=None)]
    assert start_successes(outcomes) == {17: pytest.approx(0.5), 18: pytest.approx(0.7)}


def test_kept_runs_are_found_again(tmp_path: Path) -> None:
    kept = OutcomeFile(tmp_path / "deep" / "runs.jsonl")
    assert kept.read() == {}
    first, second = made(), made(method="gspo", success=None, stopped="not finite")
    kept.append(first)
    kept.append(second)
    assert kept.read() == {first.cell: first, second.cell: second}
    again = dataclasses.replace(first, success=0.9)
    kept.append(again)
    assert kept.read()[first.cell] == again


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_line_costs_its_own_run_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "runs.jsonl"
    kept = OutcomeFile(path)
    first, torn, last = made(), made(lag=8), made(lag=16)
    kept.append(first)
    kept.append(torn)
    path.write_bytes(path.read_bytes()[:-cut])
    survived = torn.cell in kept.read()
    kept.append(last)
    assert set(kept.read()) == {first.cell, last.cell} | ({torn.cell} if survived else set())
    assert survived == (cut == 1)


def test_a_run_with_other_settings_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    values = made().as_json()
    values["settings"] = {**values["settings"], "broadcast.every_versions": 3}
    path.write_text(json.dumps(values) + "\n")
    assert OutcomeFile(path).read() == {}


def test_json_is_the_way_there_and_back() -> None:
    outcome = made(stopped="x", success=None)
    assert Outcome.from_json(json.loads(json.dumps(outcome.as_json()))) == outcome
