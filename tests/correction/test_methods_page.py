"""docs/methods.md says what exists, to the last default: recipes, parts, needs, tests, examples."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path

import pytest

from correction.composition import Recipe
from correction.errors import RecipeError
from correction.parts import PARTS, SEVERAL, Part, kind_of, parameters_of
from correction.recipes import RECIPES, resolve

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
SLOTS = {**PARTS, **SEVERAL}
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def rows_of(text: str) -> list[list[str]]:
    """Cells of all rows of tables whose first cell is a name, without its backticks."""
    rows = re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|$", text, re.MULTILINE)
    return [[name, *(cell.strip() for cell in rest.split("|"))] for name, rest in rows]


def section(heading: str) -> str:
    """What stands under a heading of the page, up to the next of its rank or a higher one."""
    rank = heading.count("#")
    _, _, after = PAGE.partition(f"\n{heading}\n")
    return re.split(rf"\n#{{2,{rank}}} ", after)[0]


def values_of(part: Part) -> dict[str, object]:
    if isinstance(part, StrEnum):
        return {}
    return {field.name: getattr(part, field.name) for field in fields(part)}


def shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def choices(part: Part, name: str, value: object) -> str:
    """A value, and for a choice what may stand there instead."""
    if not isinstance(value, StrEnum) or isinstance(part, StrEnum):
        return shown(value)
    allowed = [value.value]
    for other in type(value):
        try:
            replace(part, **{name: other})  # type: ignore[arg-type]
        except RecipeError:
            continue
        allowed += [] if other is value else [other.value]
    return "/".join(allowed)


def parameters(part: Part) -> str:
    told = [f"`{name}` {choices(part, name, value)}" for name, value in values_of(part).items()]
    return ", ".join(told) or "-"


def composition(recipe: Recipe) -> str:
    """Every part with what differs from its defaults."""
    told = []
    for slot, part in recipe.standing:
        kind = kind_of(part)
        usual = values_of(SLOTS[slot][kind])
        other = [f"{n}={shown(v)}" for n, v in values_of(part).items() if v != usual[n]]
        if kind != "none":
            told.append(" ".join([*(["critic"] if slot == "critic" else []), kind, *other]))
    return "; ".join(told)


RECIPE_ROWS = {name: cells for name, *cells in rows_of(section("## Recipes"))}
PART_ROWS = rows_of(section("## Parts"))


def test_every_recipe_has_one_row_in_the_order_of_the_catalogue() -> None:
    assert [name for name, *_ in rows_of(section("## Recipes"))] == [*RECIPES]


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_tells_its_recipe(name: str) -> None:
    recipe = RECIPES[name]
    loss, paper, parts, needs, pinned = RECIPE_ROWS[name]
    assert loss
    assert parts == composition(recipe)
    assert needs == (", ".join(sorted(recipe.needs)) or "-")
    assert paper != "-" or name == "none"
    assert ("EXPERIMENTAL" in loss) == bool(recipe.experimental)
    module, _, test = pinned.strip("`").partition("::")
    found = ROOT / "tests" / "numerics" / f"{module}.py"
    assert f"def {test}(" in found.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("slot", "kind"), [(slot, kind) for slot, kinds in SLOTS.items() for kind in kinds]
)
def test_every_part_has_a_row_with_its_parameters_and_their_defaults(slot: str, kind: str) -> None:
    if kind == "none":
        assert f"`{kind}`" in PAGE
        return
    part = SLOTS[slot][kind]
    told = parameters(part)
    rows = [cells for name, *cells in PART_ROWS if name == kind and len(cells) == 3]
    assert told in [cells[2] for cells in rows]
    assert all(cells[0] and cells[1] for cells in rows)
    assert all(f"`{name}`" in told for name in parameters_of(part))


@pytest.mark.parametrize("slot", SLOTS)
def test_a_slot_lists_its_kinds_and_no_others(slot: str) -> None:
    together = ("critic", "control", "group_filter")
    slots = together if slot in together else (slot,)
    kinds = {kind for one in slots for kind in SLOTS[one] if kind != "none"}
    rows = [name for name, *cells in rows_of(section(f"### {', '.join(slots)}")) if len(cells) == 3]
    assert set(rows) == kinds
    assert len(rows) == len(kinds)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_resolves_to_what_it_names(example: str) -> None:
    correction = tomllib.loads(example)["correction"]
    recipe = resolve(
        correction["recipe"], correction["overrides"], max_lag_versions=4, group_size=4
    )
    assert recipe != RECIPES[recipe.name]
    assert recipe.corrects_lag


def test_the_examples_do_what_the_text_around_them_says() -> None:
    several = []
    for example in EXAMPLES:
        correction = tomllib.loads(example)["correction"]
        made = resolve(
            correction["recipe"], correction["overrides"], max_lag_versions=4, group_size=4
        )
        several.append([kind_of(part) for slot, part in made.standing if slot in SEVERAL])
    assert several == [[], ["veto", "kl", "overlong_filter"], ["dppo_kl"]]
