"""The main job, end to end, on the real stack: what the demo promises.

One run of the demo, as it ships, is looked at from all sides: it is the longest test.
"""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from tests.integration.runs import DEMO, Finished, finish, left_behind, run, start

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]
MAX_LAG = 4


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, str, set[int]]:
    """The finished demo, one scrape of its metrics while it trained, processes left behind."""
    root = tmp_path_factory.mktemp("runs")
    process = start(root, {}, DEMO)
    assert process.stdout is not None
    scraped, lines = "", []
    port = None
    for line in process.stdout:
        lines.append(line)
        if port is None and (found := re.search(r"metrics on port (\d+)", line)):
            port = int(found[1])
        if port is not None and re.match(r"step [1-9]", line):
            url = f"http://127.0.0.1:{port}/metrics"
            scraped = urllib.request.urlopen(url, timeout=10).read().decode()
            break
    finished = finish(process, root, timeout_s=800)
    print("".join(lines) + finished.output)
    return finished, scraped, set(left_behind(root))


def test_it_exits_with_0_and_leaves_nothing_behind(
    demo: tuple[Finished, str, set[int]],
) -> None:
    finished, _, left = demo
    assert finished.code == 0
    assert not left
    assert finished.directory is not None
    assert not list(Path("/dev/shm").glob(f"lagwise-{finished.directory.name}*"))
    assert finished.output.strip().splitlines()[-1].startswith("done: max_steps")


def test_the_policy_gets_better_on_held_out_tasks(demo: tuple[Finished, str, set[int]]) -> None:
    finished, _, _ = demo
    before, after = finished.summary["evaluation"][0], finished.summary["evaluation"][-1]
    assert finished.summary["steps"] >= 60
    assert before["success"] < 0.65
    assert after["success"] > 0.85  # the benchmark demo_seeds states what it reaches


def test_lag_is_above_0_and_never_above_its_bound(demo: tuple[Finished, str, set[int]]) -> None:
    finished, _, _ = demo
    lag = finished.summary["policy_lag"]
    assert 0 < lag["mean"] <= lag["max"] <= MAX_LAG
    for step in finished.records("step"):
        assert max(map(int, step["lag_tokens"])) <= MAX_LAG


def test_the_summary_is_complete_and_its_ledger_closed(
    demo: tuple[Finished, str, set[int]],
) -> None:
    summary = demo[0].summary
    assert summary["status"] == "done"
    for unit in ("trajectories", "tokens"):
        account = summary[unit]
        issued = account["issued" if unit == "trajectories" else "generated"]
        assert account["open"] == 0
        assert issued == account["trained"] + sum(account["dropped"].values())
    assert {"gather", "put", "fetch", "pause", "load", "verify", "resume"} <= set(
        summary["broadcast"]["phases_s"]
    )
    assert set(summary["reward"]) == {"first", "last", "best"}
    assert set(summary["ess_ratio"]) == {"raw", "bounded"}
    assert set(summary["idle"]) == {"learner", "actors"}
    assert summary["reuse"] == {"mean": 1.0, "max": 1}


def test_tokens_at_lag_0_show_engine_and_learner_to_agree(
    demo: tuple[Finished, str, set[int]],
) -> None:
    """Every sampled token whose version is the learner's: the engine's logprob is the learner's."""
    steps = demo[0].records("step")
    mismatch = [
        step["metrics"]["log_ratio_abs_max@lag=0"]
        for step in steps
        if step["metrics"].get("tokens@lag=0", 0) > 0
    ]
    assert mismatch
    assert max(mismatch) < 1e-4


def test_every_swap_was_proven_by_its_canary(demo: tuple[Finished, str, set[int]]) -> None:
    swapped = [b for b in demo[0].records("broadcast") if b["outcome"] == "swapped"]
    assert len(swapped) > 20
    assert all(0 <= broadcast["mismatch"] < 1e-3 for broadcast in swapped)
    assert any(broadcast["mismatch"] > 0 for broadcast in swapped)


def test_the_endpoint_showed_lag_reuse_and_the_ledger(
    demo: tuple[Finished, str, set[int]],
) -> None:
    _, scraped, _ = demo
    for name in (
        "lagwise_policy_lag",
        "lagwise_reuse",
        "lagwise_queue",
        "lagwise_broadcast",
        "lagwise_reward",
        "lagwise_ess_ratio",
    ):
        assert name in scraped


def test_transformers_and_vllm_load_the_policy(
    demo: tuple[Finished, str, set[int]], tmp_path: Path
) -> None:
    """The next run starts from it: its learner (transformers) and its engine (vLLM) agree by
    canary, and its first evaluation is as good as the last one of the demo."""
    directory = demo[0].directory
    assert directory is not None
    assert (directory / "policy" / "model.safetensors").is_file()
    settings = {"model.path": str(directory / "policy"), "run.max_steps": 1}
    finished = run(tmp_path, {**settings, "evaluation.at_end": False})
    assert finished.code == 0, finished.output
    assert finished.summary["evaluation"][0]["success"] > 0.85
