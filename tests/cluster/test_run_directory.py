import json
import math
import os
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from cluster.observing.run_directory import RunDirectory, write_json
from cluster.observing.step_log import StepLog, read_log
from correction.errors import ConfigError
from tests.cluster.made_events import make_broadcast, make_evaluation, make_step

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


def test_names_are_unique_and_sort_by_start(tmp_path: Path) -> None:
    made = [RunDirectory.create(tmp_path / "runs", "demo", NOW).path.name for _ in range(12)]
    made.append(
        RunDirectory.create(tmp_path / "runs", "demo", NOW + timedelta(seconds=1)).path.name
    )
    assert made[0] == "20260131T120000Z-demo"
    assert len(set(made)) == 13
    assert sorted(made) == made


def test_the_stamp_is_utc_whatever_the_zone_of_the_clock(tmp_path: Path) -> None:
    there = NOW.astimezone(timezone(timedelta(hours=9)))
    assert RunDirectory.create(tmp_path, "x", there).path.name == "20260131T120000Z-x"


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", "...", "-rf", "ä b\n"])
def test_no_name_leaves_the_root_or_hides(tmp_path: Path, name: str) -> None:
    path = RunDirectory.create(tmp_path, name, NOW).path
    assert path.parent == tmp_path
    assert not path.name.startswith((".", "-"))
    assert path.name.isascii()
    assert path.name[-1].isalnum()


def test_an_unwritable_root_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write under"):
        RunDirectory.create(tmp_path / "file", "demo")


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        RunDirectory.open(tmp_path)
    run = RunDirectory.create(tmp_path, "demo")
    run.write_config({"seed": 1})
    assert RunDirectory.open(run.path) == run


def test_summary_is_replaced_as_a_whole_and_leaves_no_other_file(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "demo")
    run.write_summary({"status": "failed", "lag": {0: 1, 1: float("nan")}})
    run.write_summary({"status": "done", "lag": {0: 1, 1: math.inf}})
    assert json.loads(run.summary_path.read_text()) == {
        "status": "done",
        "lag": {"0": 1, "1": None},
    }
    assert os.listdir(run.path) == ["summary.json"]


def test_a_failed_write_keeps_the_old_file_and_no_part_of_the_new(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"status": "done"})
    with pytest.raises(TypeError):
        write_json(path, {"status": object()})
    (tmp_path / "gone").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "gone", {"status": "done"})
    assert json.loads(path.read_text()) == {"status": "done"}
    assert sorted(os.listdir(tmp_path)) == ["gone", "summary.json"]


def test_each_event_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    log.on_step(make_step(3, lag_tokens={0: 1, 2: 5}, gradient_norm=float("inf"), applied=False))
    assert [record["kind"] for record in read_log(path)] == ["step"]
    log.on_broadcast(make_broadcast("actor-1", version=3, phases_s={"load": 0.5}))
    log.on_evaluation(make_evaluation(3))
    step, broadcast, evaluation = read_log(path)
    log.close()
    log.close()
    assert (step["policy_version"], step["epoch"], step["applied"]) == (3, 0, False)
    assert step["lag_tokens"] == {"0": 1, "2": 5}
    assert step["gradient_norm"] is None
    assert (broadcast["kind"], broadcast["engine"]) == ("broadcast", "actor-1")
    assert broadcast["phases_s"] == {"load": 0.5}
    assert (evaluation["kind"], evaluation["success"]) == ("evaluation", 0.75)


def test_a_line_torn_at_any_byte_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    log.on_step(make_step(1))
    log.on_step(make_step(2))
    log.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        resumed = StepLog(path)
        resumed.on_step(make_step(3))
        resumed.close()
        assert [record["policy_version"] for record in read_log(path)] == [1, 3]


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    log.on_step(make_step(1, metrics={"a": float("nan"), "b": 1.0}))
    log.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["metrics"] == {"a": None, "b": 1.0}
