"""Other shapes of a run, and what a run does when something in it breaks. All on the real stack."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.runs import Finished, finish, left_behind, processes, run, start

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]
SMALL: dict[str, object] = {
    "run.max_steps": 4,
    "rollout.group_size": 4,
    "learner.groups_per_step": 4,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "metrics.enabled": False,
}


def closed(finished: Finished) -> bool:
    """Whether the ledger of a finished run closes with nothing open."""
    account = finished.summary["trajectories"]
    return bool(
        account["open"] == 0
        and account["issued"] == account["trained"] + sum(account["dropped"].values())
    )


def until_first_step(process: subprocess.Popen[str]) -> None:
    """Read a run's lines until it has trained."""
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(r"step [1-9]", line):
            return


def send(root: Path, name: str, number: signal.Signals) -> None:
    """Send a signal to the one process of a run that has `name` in its command line."""
    (pid,) = [pid for pid, command in processes(root).items() if name in command]
    os.kill(pid, number)


def test_max_lag_0_is_strictly_on_policy(tmp_path: Path) -> None:
    finished = run(tmp_path, {**SMALL, "lag.max_lag_versions": 0})
    assert finished.code == 0, finished.output
    assert finished.summary["policy_lag"]["histogram"].keys() == {"0"}
    assert finished.summary["steps"] == 4
    assert closed(finished)


def test_two_ranks_two_engines_reuse_gspo_and_an_adaptive_schedule(tmp_path: Path) -> None:
    shape = {
        "learner.ranks": 2,
        "actors.count": 2,
        "learner.max_reuse": 2,
        "learner.zero_stage": 2,
        "correction.recipe": "gspo",
        "broadcast.schedule": "adaptive",
    }
    finished = run(tmp_path, {**SMALL, **shape})
    assert finished.code == 0, finished.output
    assert finished.summary["reuse"] == {"mean": 2.0, "max": 2}
    assert finished.summary["policy_lag"]["max"] <= 4
    engines = {broadcast["engine"] for broadcast in finished.records("broadcast")}
    assert engines == {"actor-0", "actor-1"}
    assert closed(finished)


def test_an_engine_that_is_killed_is_replaced_and_accounted(tmp_path: Path) -> None:
    process = start(tmp_path, {**SMALL, "run.max_steps": 40})
    until_first_step(process)
    send(tmp_path, "EngineCore", signal.SIGKILL)
    finished = finish(process, tmp_path)
    assert finished.code == 0, finished.output
    assert "actor-0 is lost" in finished.output
    assert finished.summary["steps"] == 40
    assert closed(finished)


def test_without_restarts_left_the_first_cause_ends_the_run(tmp_path: Path) -> None:
    process = start(tmp_path, {**SMALL, "run.max_steps": 400, "actors.max_restarts": 0})
    until_first_step(process)
    send(tmp_path, "EngineCore", signal.SIGKILL)
    finished = finish(process, tmp_path)
    assert finished.code == 1
    assert "actor-0 failed after 0 restarts" in finished.output.strip().splitlines()[-1]
    assert finished.summary["status"] == "failed"
    assert "actor-0" in finished.summary["first_cause"]
    assert closed(finished)


def test_a_learner_that_hangs_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    short = {
        "run.stall_timeout_s": 20,
        "rollout.episode_deadline_s": 10,
        "rollout.environment_deadline_s": 5,
        "engine.swap_deadline_s": 10,
        "broadcast.engine_deadline_s": 10,
    }
    process = start(tmp_path, {**SMALL, **short, "run.max_steps": 4000})
    until_first_step(process)
    send(tmp_path, "LearnerShell", signal.SIGSTOP)
    finished = finish(process, tmp_path)
    assert finished.code == 1
    assert "a learner rank did not answer within 20 s" in finished.output.strip().splitlines()[-1]
    assert closed(finished)
    assert not left_behind(tmp_path)


def test_sigterm_ends_a_run_in_order(tmp_path: Path) -> None:
    process = start(tmp_path, {**SMALL, "run.max_steps": 4000})
    until_first_step(process)
    process.send_signal(signal.SIGTERM)
    finished = finish(process, tmp_path)
    assert finished.code == 0, finished.output
    assert finished.summary["reason"] == "SIGTERM"
    assert closed(finished)
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lag.max_lag_version": 2}, "did you mean"),
        ({"lag.max_lag_versions": "2"}, "lag.max_lag_versions"),
        ({"correction.recipe": "none"}, "correction.none"),
        ({"queue.max_groups": 4}, "queue.max_groups"),
        ({"learner.max_reuse": 9}, "learner.max_reuse"),
        ({"environment.name": "calculatr"}, "environment.name"),
        ({"model.path": "no/such/model"}, "model.path"),
    ],
)
def test_wrong_configurations_are_refused_before_anything_starts(
    tmp_path: Path, settings: dict[str, object], key: str
) -> None:
    finished = run(tmp_path, {**SMALL, **settings})
    assert finished.code == 2, finished.output
    assert key in finished.output


def test_more_gpus_than_the_cluster_has_are_refused(tmp_path: Path) -> None:
    finished = run(tmp_path, {**SMALL, "actors.num_gpus": 1, "actors.count": 3})
    assert finished.code == 2, finished.output
    assert "actors.num_gpus" in finished.output
