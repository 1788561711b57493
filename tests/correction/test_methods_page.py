"""docs/methods.md says what exists: every recipe and part, and tests that can be found."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from correction.parts import PARTS, SEVERAL, kind_of, parameters_of
from correction.recipes import RECIPES, resolve

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
RECIPE_TABLE = PAGE.partition("## Parts")[0]
ROWS = {row[1]: row[0] for row in re.finditer(r"^\| `(\w+)`.*$", RECIPE_TABLE, re.MULTILINE)}


def test_every_recipe_has_a_row_that_names_its_parts() -> None:
    for name, recipe in RECIPES.items():
        for slot, part in recipe.standing:
            implied = kind_of(part) == "none" or slot in ("proximal", "group_filter")
            assert implied or kind_of(part) in ROWS[name], (name, part)


def test_the_needs_of_a_row_are_those_of_its_recipe() -> None:
    for name, recipe in RECIPES.items():
        _, _, paper, _, needs, _ = [cell.strip() for cell in ROWS[name].strip("|").split("|")][-6:]
        assert needs == (", ".join(sorted(recipe.needs)) or "-"), name
        assert paper != "-" or name == "none", name


def test_every_parameter_is_on_the_page() -> None:
    for kinds in (*PARTS.values(), *SEVERAL.values()):
        for kind, part in kinds.items():
            for parameter in parameters_of(part):
                assert f"`{parameter}`" in PAGE, (kind, parameter)


def test_every_kind_of_every_slot_is_on_the_page() -> None:
    for slot, kinds in (*PARTS.items(), *SEVERAL.items()):
        for kind in kinds:
            assert f"`{kind}`" in PAGE, (slot, kind)


def test_the_tests_that_pin_a_recipe_exist() -> None:
    for name in RECIPES:
        module, _, test = re.findall(r"`(\w+)(::)(\w+)`", ROWS[name])[0]
        found = ROOT / "tests" / "numerics" / f"{module}.py"
        assert f"def {test}(" in found.read_text(encoding="utf-8"), name


def test_the_example_resolves() -> None:
    example = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert example
    correction = tomllib.loads(example[1])["correction"]
    recipe = resolve(
        correction["recipe"], correction["overrides"], max_lag_versions=4, group_size=4
    )
    assert recipe.name == "gspo"
