"""docs/methods.md on the configuration: its keys and defaults, and examples that a run takes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cluster.config import RunConfig, parse_config
from cluster.correction_checks import correction_fits

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
KEYS = re.findall(r"^\| `(\w+)\.(\w+)` \| (\S+) \|", PAGE, re.MULTILINE)
NOT_YET = ("srpo", "arpo", "dagger")


def test_the_tables_of_what_recipes_need_are_told_whole() -> None:
    told = {(table, key) for table, key, _ in KEYS}
    defaults = RunConfig()
    assert told == {
        (table, key)
        for table in ("critic", "reference", "pretraining")
        for key in type(getattr(defaults, table)).model_fields
    }


@pytest.mark.parametrize(("table", "key", "default"), KEYS)
def test_a_key_has_the_default_that_the_page_says(table: str, key: str, default: str) -> None:
    value = getattr(getattr(RunConfig(), table), key)
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    assert default == ("-" if value is None else shown)


@pytest.mark.parametrize("example", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_a_run_takes_every_example(example: str) -> None:
    assert correction_fits(parse_config(tomllib.loads(example))) is None


@pytest.mark.parametrize("recipe", NOT_YET)
def test_recipes_that_no_run_can_feed_are_refused_as_the_page_says(recipe: str) -> None:
    assert f"`{recipe}`" in PAGE
    problem = correction_fits(parse_config({"correction": {"recipe": recipe}}))
    assert problem is not None
    assert "no run has" in problem
