"""A name in a config becomes a Recipe, checked against the run; and a Recipe becomes text.

Methods, formulas, papers and the tests that pin them: docs/methods.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from correction.catalogue_reuse import REUSE_RECIPES
from correction.catalogue_signal import SIGNAL_RECIPES
from correction.composition import Recipe
from correction.errors import RecipeError
from correction.overrides import apply_overrides, flatten
from correction.parts import SEVERAL, Part, kind_of, parameters_of
from correction.trust_parts import MaxLag

__all__ = ["DEFAULT_RECIPE", "RECIPES", "Recipe", "describe", "resolve"]

DEFAULT_RECIPE = "decoupled_ppo"

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe for recipe in (*REUSE_RECIPES, *SIGNAL_RECIPES)
}
"""Every named method, by name. Papers and formulas: docs/methods.md."""


def resolve(
    name: str, overrides: Mapping[str, object], *, max_lag_versions: int, group_size: int
) -> Recipe:
    """The recipe `name` with `overrides`, checked against the run that it is meant for.

    overrides: slots and parameters as `overrides` reads them, and `allow_no_correction`.
    max_lag_versions: largest policy lag that the run admits. group_size: trajectories of one
    group. Raises RecipeError with the reason and the way out for an unknown name, an unknown
    override, a value out of range, and for parts that may not be combined.
    """
    if name not in RECIPES:
        raise RecipeError(f"correction.recipe: unknown {name!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    flat = dict(flatten(overrides))
    allowed = flat.pop("allow_no_correction", recipe.allow_no_correction)
    if not isinstance(allowed, bool):
        raise RecipeError(f"correction.allow_no_correction: not true or false: {allowed!r}")
    changes: dict[str, Any] = {**apply_overrides(recipe.parts, flat)}
    recipe = dataclasses.replace(recipe, allow_no_correction=allowed, **changes)
    if "proximal" in flat and not recipe.looks_at_proximal:
        raise RecipeError(
            f"correction.proximal: has no effect, neither surrogate {recipe.surrogate.kind} nor "
            f"weight {recipe.weight.kind} looks at the proximal policy; remove it"
        )
    _check_run(recipe, max_lag_versions, group_size)
    return recipe


def describe(recipe: Recipe) -> str:
    """The composition as text, one slot a line, with every parameter that has an effect.

    Slots that hold nothing are left out.
    """
    lines = [f"recipe        {recipe.name}"]
    for slot, part in recipe.standing:
        if slot in SEVERAL or slot == "weight" or kind_of(part) != "none":
            lines.append(f"{slot:<13} {_told(part)}")
    lines.append(f"needs         {', '.join(sorted(recipe.needs)) or 'nothing beyond mu'}")
    lines.append(f"corrects lag  {'yes' if recipe.corrects_lag else 'no'}")
    if recipe.experimental:
        lines.append(f"experimental  {recipe.experimental}")
    return "\n".join(lines)


def _told(part: Part) -> str:
    values = ", ".join(f"{name}={value}" for name, value in parameters_of(part).items())
    return kind_of(part) + (f" ({values})" if values else "")


def _check_run(recipe: Recipe, max_lag_versions: int, group_size: int) -> None:
    harmless = recipe.corrects_lag or recipe.is_imitation or recipe.allow_no_correction
    if max_lag_versions > 0 and not harmless:
        raise RecipeError(
            f"correction.recipe: {recipe.name!r}, so composed, corrects for no lag; max_lag is "
            f"{max_lag_versions}. Set max_lag = 0, or a recipe that corrects (decoupled_ppo, "
            "gspo, ppo_bypass), or allow_no_correction = true to do without"
        )
    for slot, part, other in (
        ("advantage", recipe.advantage, "return"),
        ("surrogate", recipe.surrogate, "ppo_clip"),
    ):
        if part.needs_group and group_size < 2:
            raise RecipeError(
                f"correction.{slot}: {part.kind} needs groups of at least 2, group_size is "
                f"{group_size}. Set a larger group_size or {slot} = {other}"
            )
    for mask in recipe.trust:
        if isinstance(mask, MaxLag) and mask.max_lag_versions >= max_lag_versions:
            raise RecipeError(
                f"correction.trust.max_lag.max_lag_versions: {mask.max_lag_versions} rejects "
                f"nothing, the run admits a lag of at most {max_lag_versions}. Set a smaller one"
            )
