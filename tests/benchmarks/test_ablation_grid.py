"""The grid of the lag ablation: which runs, and settings that a run accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._ablation_grid import CONFIG, METHODS, Cell, Grid, lag_settings
from cluster.checks import check_config
from cluster.config import load_config, toml_value
from correction.errors import ConfigError
from correction.recipes import RECIPES
from tests.benchmarks.ablation_outcomes import made

LAGS = (0, 2, 4, 8, 16)


def overrides(settings: dict[str, object]) -> list[str]:
    return [
        f'{key}="{v}"' if isinstance(v, str) else f"{key}={v}".replace("True", "true")
        for key, v in settings.items()
    ]


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("method", METHODS)
def test_every_cell_is_a_configuration_that_runs(method: str, lag: int) -> None:
    settings = Cell(17, lag, method, 60, 5e-4).settings()
    config = load_config(Path(CONFIG), overrides(settings))
    check_config(config)
    assert config.lag.max_lag_versions == (0 if lag == 0 else lag * 3 // 2)
    assert config.correction.recipe == method


def test_methods_are_recipes_and_only_no_correction_is_told_to_do_without() -> None:
    assert set(METHODS) <= set(RECIPES)
    assert [name for name in METHODS if "correction.none" in METHODS[name]] == ["none"]


@pytest.mark.parametrize("lag", LAGS)
def test_methods_at_one_lag_differ_in_the_correction_alone(lag: int) -> None:
    told = [
        {k: v for k, v in Cell(17, lag, name, 60, 5e-4).settings().items() if "correction" not in k}
        for name in METHODS
    ]
    assert all(each == told[0] for each in told)


def test_a_slow_actor_and_a_fast_one_come_to_the_same_mean_lag() -> None:
    """Broadcast and pipeline on one side, the full queue on the other; see the module."""
    for lag in (2, 4, 8, 16):
        settings = lag_settings(lag)
        bound, every = settings["lag.max_lag_versions"], settings["broadcast.every_versions"]
        assert isinstance(bound, int)
        assert isinstance(every, int)
        assert bound - every / 2 == lag
        assert every <= bound


def test_the_grid_is_whole_seed_by_seed() -> None:
    cells = list(Grid((17, 18), LAGS, tuple(METHODS), 60, 5e-4).cells())
    assert len(cells) == len(set(cells)) == 60
    assert [cell.seed for cell in cells] == [17] * 30 + [18] * 30
    assert {(cell.lag, cell.method) for cell in cells[:30]} == {
        (lag, method) for lag in LAGS for method in METHODS
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seeds": []}, "seeds"),
        ({"seeds": 17}, "seeds"),
        ({"seeds": [17, 17]}, "seeds"),
        ({"lags": [-1]}, "lags"),
        ({"lags": [1.5]}, "lags"),
        ({"methods": ["grpo"]}, "methods"),
        ({"methods": "tis"}, "methods"),
        ({"steps": 9}, "steps"),
        ({"steps": True}, "steps"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, object], named: str) -> None:
    good = {"seeds": [17], "lags": [0], "methods": ["tis"], "steps": 10, "learning_rate": 5e-4}
    with pytest.raises(ConfigError, match=f"^{named}"):
        Grid(**{**good, **change})  # type: ignore[arg-type]


def test_settings_survive_the_way_through_toml_and_json() -> None:
    """Else a kept run would never be recognised."""
    for method in METHODS:
        settings = made(method=method).settings
        for override in overrides(dict(settings)):
            key, _, text = override.partition("=")
            assert toml_value(override, text) == settings[key]
