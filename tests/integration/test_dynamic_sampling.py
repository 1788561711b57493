"""Dynamic sampling on the real stack: every batch is whole and mixed, and what it cost is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import run

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]
STEPS, GROUPS, MEMBERS = 6, 4, 2
FILTERING: dict[str, object] = {
    "run.max_steps": STEPS,
    "rollout.group_size": MEMBERS,
    "learner.groups_per_step": GROUPS,
    "correction.overrides.group_filter": "mixed_rewards",
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "metrics.enabled": False,
}


def test_every_trained_group_is_mixed_and_the_filtered_ones_are_accounted(tmp_path: Path) -> None:
    finished = run(tmp_path, FILTERING)
    assert finished.code == 0, finished.output
    groups, summary = finished.summary["groups"], finished.summary
    print(groups)
    assert groups["kept"].keys() == {"mixed"}
    assert summary["trajectories"]["trained"] == STEPS * GROUPS * MEMBERS
    filtered = groups["filtered"]
    assert filtered
    assert filtered.keys() <= {"all_best", "all_worst"}
    for outcome, reward in (("all_best", 1.0), ("all_worst", 0.0)):
        assert filtered.get(outcome, {}).get("reward_mean", reward) == reward
    for unit, issued in (("trajectories", "issued"), ("tokens", "generated")):
        account = summary[unit]
        assert account["open"] == 0
        assert account[issued] == account["trained"] + sum(account["dropped"].values())
        assert account["dropped"]["filtered"] == sum(costs[unit] for costs in filtered.values())
    share = summary["tokens"]["dropped"]["filtered"] / summary["tokens"]["generated"]
    assert groups["filtered_tokens_ratio"] == pytest.approx(share)
    assert summary["policy_lag"]["per_trajectory"]["max"] <= 4
    steps = finished.records("step")
    assert all(step["trajectories"] == GROUPS * MEMBERS for step in steps)
    assert {step["reward_mean"] for step in steps} == {0.5}  # one of two, in every group


def test_a_run_that_filters_everything_stops_with_the_cause(tmp_path: Path) -> None:
    """One turn is too short for any answer, so every reward is 0."""
    hopeless = {"rollout.max_turns": 1, "rollout.max_turn_tokens": 1}
    finished = run(tmp_path, {**FILTERING, **hopeless, "rollout.max_filtered_in_a_row": 20})
    assert finished.code == 1, finished.output
    last = finished.output.strip().splitlines()[-1]
    assert "every group of the last 20 had equal rewards (20 all_worst; mean reward 0)" in last
    assert "too hard for this policy" in last
    assert finished.summary["steps"] == 0
    account = finished.summary["trajectories"]
    assert account["open"] == 0
    assert account["dropped"]["filtered"] >= 20 * MEMBERS
