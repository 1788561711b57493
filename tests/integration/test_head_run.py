"""Score Centering on the real stack: heads from vLLM to the loss, their bytes in the summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.trajectory.head import BYTES_PER_HEAD_TOKEN
from tests.integration.runs import left_behind, run

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]
HEAD_TOKENS = 32
SHORT: dict[str, object] = {
    "run.max_steps": 3,
    "rollout.group_size": 4,
    "learner.groups_per_step": 4,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "metrics.enabled": False,
}


def test_heads_come_from_the_engine_to_the_loss_and_are_counted(tmp_path: Path) -> None:
    recipe = {
        "correction.recipe": "score_centering",
        "correction.overrides.surrogate.head": HEAD_TOKENS,
    }
    finished = run(tmp_path, {**SHORT, **recipe})
    assert finished.code == 0, finished.output
    summary = finished.summary
    assert (summary["steps"], summary["trajectories"]["open"]) == (3, 0)
    assert summary["trajectories"]["dropped"] == {}
    bytes_expected = summary["tokens"]["generated"] * HEAD_TOKENS * BYTES_PER_HEAD_TOKEN
    assert summary["received"]["head_bytes"] == bytes_expected
    assert bytes_expected < summary["received"]["bytes"]
    for step in finished.records("step"):
        assert 0.9 < step["metrics"]["head_mass_behaviour"] <= 1 + 1e-6
        assert abs(step["metrics"]["head_mass_target"] - 1) < 0.1
    assert left_behind(tmp_path) == {}


def test_a_run_without_need_of_heads_asks_for_none(tmp_path: Path) -> None:
    finished = run(tmp_path, SHORT)
    assert finished.code == 0, finished.output
    assert finished.summary["received"]["head_bytes"] == 0
    assert finished.summary["received"]["bytes"] > 0
    assert "head_mass" not in json.dumps(finished.records("step"))
