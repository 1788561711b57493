"""Reading a configuration: what is accepted, and how every refusal reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from cluster.checks import check_config
from cluster.config import RunConfig, load_config, parse_config, resolved
from correction.errors import ConfigError

RUNS = sorted(Path("deploy/runs").glob("*.toml"))
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "pyarrow", "numpy")


def problem_of(text: str, tmp_path: Path, *overrides: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def loaded(text: str, tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_run_that_ships_parses_and_passes_the_checks(path: Path) -> None:
    """A model that a make target has yet to produce is stood in for by the starter."""
    config = load_config(path)
    assert config.model.path == "starter" or config.model.path.startswith(".cache/")
    check_config(load_config(path, ['model.path="starter"']))


def test_the_demo_ships() -> None:
    assert "demo.toml" in [path.name for path in RUNS]


def test_the_demos_file_says_the_defaults() -> None:
    assert load_config(next(path for path in RUNS if path.name == "demo.toml")) == RunConfig()


def test_an_empty_file_is_the_default_configuration(tmp_path: Path) -> None:
    assert loaded("", tmp_path) == RunConfig()


def test_what_was_resolved_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = loaded(
        "[learner]\nbetas = [0.8, 0.9]\n[environment]\noptions = {digits = 2, list = [1, 2.5]}",
        tmp_path,
        "run.max_wall_s=12",
    )
    dumped = json.loads(json.dumps(resolved(config)))
    assert parse_config(dumped) == config
    assert dumped["run"]["max_wall_s"] == 12.0
    assert dumped["queue"]["max_groups"] is None
    assert set(dumped) == set(RunConfig.model_fields)


def test_every_key_says_what_it_is() -> None:
    assert [key for key, text in fields(RunConfig) if not text] == []


def test_times_and_sizes_have_their_unit_in_the_name() -> None:
    for key, text in fields(RunConfig):
        words = (text or "").lower().split()
        if words[0] == "seconds":
            assert key.endswith("_s"), key


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().run.seed = 3


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[run]\nseed = "3"', 'run.seed = "3": expected an integer'),
        ("[run]\nseed = 3.0", "run.seed = 3.0: expected an integer"),
        ("[run]\nseed = -1", "run.seed = -1: expected a number >= 0"),
        ("[run]\nstall_timeout_s = true", "run.stall_timeout_s = true: expected a number"),
        ("[run]\nstall_timeout_s = inf", "run.stall_timeout_s = Infinity: expected a finite"),
        ("[run]\nstall_timeout_s = nan", "run.stall_timeout_s = NaN: expected a finite"),
        ("[run]\nstall_timeout_s = 0", "run.stall_timeout_s = 0: expected a number > 0"),
        ('[run]\nname = "../x"', 'run.name = "../x": expected letters, digits'),
        ("[metrics]\nenabled = 1", "metrics.enabled = 1: expected true or false"),
        ('[model]\ndtype = "fp8"', "model.dtype = \"fp8\": expected 'float32' or 'bfloat16'"),
        ("[learner]\nbetas = [0.9]", "learner.betas.1: a value is missing"),
        ("[learner]\nbetas = [0.9, 1.0]", "learner.betas.1 = 1.0: expected a number < 1"),
        ("[learner]\nbetas = 0.9", "learner.betas = 0.9: expected a list"),
        ("run = 3", "run = 3: expected a table"),
        ("[environment]\noptions = 3", "environment.options = 3: expected a table"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(text: str, line: str, tmp_path: Path) -> None:
    assert f"\n  {line}" in problem_of(text, tmp_path)


def test_a_date_is_refused_and_not_taken_for_text(tmp_path: Path) -> None:
    assert "2024-01-01 is a date" in problem_of("[run]\nname = 2024-01-01", tmp_path)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        (
            "[rollout]\ngruop_size = 3",
            "gruop_size = 3: unknown key; did you mean rollout.group_size?",
        ),
        ("[learner]\ngroup_size = 3", "did you mean rollout.group_size?"),
        ("max_steps = 3", "did you mean run.max_steps?"),
        ("[rolout]\ngroup_size = 3", "unknown table; did you mean rollout?"),
        ("[actors]\nzzz = 1", "[actors] has count, groups_in_flight, num_cpus"),
        ("zzz = 1", "there are run, model, environment"),
    ],
)
def test_a_misspelt_key_is_told_what_was_probably_meant(
    text: str, guess: str, tmp_path: Path
) -> None:
    assert guess in problem_of(text, tmp_path)


@pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", "50"), ("top_k", "0")])
def test_a_cut_support_is_refused_with_the_reason(key: str, value: str, tmp_path: Path) -> None:
    problem = problem_of(f"[rollout]\n{key} = {value}", tmp_path)
    assert f"rollout.{key} = {value}: " in problem
    assert "rule 1" in problem


def test_the_full_support_may_be_spelt_out(tmp_path: Path) -> None:
    assert loaded("[rollout]\ntop_p = 1\ntop_k = -1", tmp_path) == RunConfig()


def test_all_problems_are_reported_together_a_line_each(tmp_path: Path) -> None:
    problem = problem_of('[run]\nseed = "x"\n[lag]\nmax_lag = 1\n[queue]\nlease_s = 0', tmp_path)
    lines = problem.splitlines()
    assert lines[0].endswith("run.toml:")
    assert [line.split()[0] for line in lines[1:]] == ["run.seed", "queue.lease_s", "lag.max_lag"]


def test_a_long_value_is_shown_in_part(tmp_path: Path) -> None:
    problem = problem_of(f'[run]\nseed = "{"x" * 5000}"', tmp_path)
    assert len(problem) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[run", "is not TOML"), (b"\xff\xfe", "is not TOML"), (b"[run]\nseed=1\nseed=2", "is not")],
)
def test_what_is_not_toml_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path)


def test_overrides_win_in_order_and_take_toml_values(tmp_path: Path) -> None:
    config = loaded(
        "[run]\nmax_steps = 5",
        tmp_path,
        "run.max_steps=6",
        "run.max_steps = 7",
        'model.path = "a=b"',
        "learner.betas=[0.5, 0.6]",
        "metrics.enabled=false",
        "correction.overrides.surrogate.clip_high=0.3",
        "environment.options={digits = 3}",
    )
    assert config.run.max_steps == 7
    assert config.model.path == "a=b"
    assert config.learner.betas == (0.5, 0.6)
    assert not config.metrics.enabled
    assert config.correction.overrides == {"surrogate": {"clip_high": 0.3}}
    assert config.environment.options == {"digits": 3}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.max_steps", "expected key=value"),
        ("=3", "expected key=value"),
        ("run..seed=3", "expected key=value"),
        ("model.path=starter", "text needs double quotes"),
        ("run.seed=", "is not a TOML value"),
        ("run.seed=1\nx=2", "is not a TOML value"),
        ("run.seed.x=1", "run.seed is not a table"),
        ("run.sede=1", "did you mean run.seed?"),
        ('run.seed="1"', "expected an integer"),
    ],
)
def test_a_bad_override_is_refused(override: str, message: str, tmp_path: Path) -> None:
    assert message in problem_of("[run]\nseed = 1", tmp_path, override)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = st.sampled_from([key for key, _ in fields(RunConfig)]) | st.text(max_size=8)


def parsed_or_problem(values: dict[str, Any]) -> RunConfig | str:
    try:
        return parse_config(values)
    except ConfigError as error:
        return str(error)


@settings(deadline=None)
@given(key=KEYS, value=JSON_VALUES)
def test_any_value_of_any_key_is_accepted_or_named(key: str, value: object) -> None:
    table, dot, name = key.partition(".")
    config = parsed_or_problem({table: {name: value}} if dot else {key: value})
    if isinstance(config, str):
        assert "\n  " in config
    else:
        assert parse_config(resolved(config)) == config


def test_importing_the_configuration_loads_nothing_heavy() -> None:
    code = (
        "import sys, cluster.config, cluster.checks;"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_no_key_is_ignored() -> None:
    """A key that nothing reads would be a promise that nobody keeps."""
    sources = "".join(
        path.read_text()
        for path in (Path(__file__).parents[2] / "cluster").rglob("*.py")
        if path.name not in ("config_sections.py", "checks.py")
    )
    leaves = {key.rpartition(".")[2]: key for key, _ in fields(RunConfig)}
    unread = [key for leaf, key in leaves.items() if not re.search(rf"\.{leaf}\b", sources)]
    assert unread == ["rollout.top_p", "rollout.top_k"]  # accepted at one value only
