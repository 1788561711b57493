"""`lagwise bench --set`: settings reach the benchmark, others are refused before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.bench import run_benchmark
from correction.errors import ConfigError

BENCHMARK = '''"""How much is two and two?"""

def measure(*, twos: int = 2, names: tuple[str, ...] = ()) -> dict[str, object]:
    return {"sum": 2 * twos, "names": list(names)}
'''


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "adding.py").write_text(BENCHMARK)
    return tmp_path


def test_settings_reach_the_benchmark_and_its_record(tmp_path: Path) -> None:
    assert run_benchmark("adding", tmp_path, ["twos=3", 'names=["a"]']) == 0
    record = json.loads((tmp_path / "adding.json").read_text())
    assert record["result"] == {"sum": 6, "names": ["a"]}
    assert record["settings"] == {"twos": 3, "names": ["a"]}
    assert record["question"] == "How much is two and two?"


@pytest.mark.parametrize(
    ("name", "setting", "why"),
    [
        ("adding", "threes=3", "twos, names"),
        ("adding", "twos=three", "not a TOML value"),
        ("adding", "twos", "not a TOML value"),
        ("all", "twos=3", "one benchmark"),
        ("taking", "twos=3", "unknown; known: adding"),
    ],
)
def test_a_bad_setting_is_refused_before_the_start(
    tmp_path: Path, name: str, setting: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        run_benchmark(name, tmp_path, [setting])
    assert not list(tmp_path.glob("*.json"))
