"""A named method is a composition of parts; wrong compositions are refused with the way out.

`resolve` turns a name and overrides into a Recipe. An override names a slot (`"surrogate":
"gspo"`, a fresh part with its default parameters) or one parameter of the part in a slot
(`"surrogate.clip_high": 0.28`). Nested mappings, as TOML tables give them, mean the same;
`kind` inside a table names the part. Methods, formulas and papers: docs/methods.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from correction.aggregation import Aggregation
from correction.errors import RecipeError
from correction.parts import (
    PARTS,
    Advantage,
    Grpo,
    Gspo,
    NoWeight,
    Part,
    PpoClip,
    ProximalBehaviourWeight,
    Reinforce,
    Surrogate,
    TargetBehaviourWeight,
    Weight,
)
from correction.proximal import Proximal
from correction.ratios import Level

DEFAULT_RECIPE = "decoupled_ppo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A policy update, composed: advantages -> proximal -> weight -> surrogate -> aggregation.

    allow_no_correction: the user accepts lagged data without any correction.
    """

    name: str
    advantage: Advantage
    proximal: Proximal
    weight: Weight
    surrogate: Surrogate
    aggregation: Aggregation
    allow_no_correction: bool = False

    @property
    def needs_proximal_pass(self) -> bool:
        """Whether the learner must score the batch before its first optimiser step on it."""
        if self.proximal is Proximal.BEHAVIOUR:
            return False
        return self.surrogate.has_ratio or self.weight.kind == ProximalBehaviourWeight.kind

    @property
    def corrects_lag(self) -> bool:
        """Whether a ratio with mu as its denominator acts anywhere in the loss."""
        ratio_to_mu = self.proximal is Proximal.BEHAVIOUR and self.surrogate.has_ratio
        return ratio_to_mu or not isinstance(self.weight, NoWeight)


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="decoupled_ppo",
            advantage=Grpo(),
            proximal=Proximal.RECOMPUTE,
            weight=ProximalBehaviourWeight(),
            surrogate=PpoClip(),
            aggregation=Aggregation.TOKEN_MEAN,
        ),
        Recipe(
            name="ppo_bypass",
            advantage=Grpo(),
            proximal=Proximal.BEHAVIOUR,
            weight=NoWeight(),
            surrogate=PpoClip(),
            aggregation=Aggregation.TOKEN_MEAN,
        ),
        Recipe(
            name="gspo",
            advantage=Grpo(),
            proximal=Proximal.RECOMPUTE,
            # Geometric like the surrogate: the two factors then make theta/mu of the same kind.
            weight=ProximalBehaviourWeight(level=Level.GEOMETRIC),
            surrogate=Gspo(),
            aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        ),
        Recipe(
            name="grpo_on_policy",
            advantage=Grpo(),
            proximal=Proximal.RECOMPUTE,
            weight=NoWeight(),
            surrogate=PpoClip(),
            aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        ),
        Recipe(
            name="none",
            advantage=Grpo(),
            proximal=Proximal.RECOMPUTE,
            weight=NoWeight(),
            surrogate=Reinforce(),
            aggregation=Aggregation.TOKEN_MEAN,
        ),
    )
}
"""Every named method, by name. Papers and formulas: docs/methods.md."""


def resolve(
    name: str, overrides: Mapping[str, object], *, max_lag_versions: int, group_size: int
) -> Recipe:
    """The recipe `name` with `overrides`, checked against the run that it is meant for.

    max_lag_versions: largest policy lag that the run admits. group_size: trajectories of one
    group. Raises RecipeError with the reason and the way out for an unknown name, an unknown
    override, a value out of range, and for parts that may not be combined.
    """
    if name not in RECIPES:
        raise RecipeError(f"correction.recipe: unknown {name!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    for key, value in sorted(_flatten(overrides), key=lambda item: item[0].count(".")):
        recipe = _override(recipe, key, value)
    _check_combination(recipe)
    _check_run(recipe, max_lag_versions, group_size)
    return recipe


def describe(recipe: Recipe) -> str:
    """The composition as text, one slot a line, with every parameter."""
    lines = [f"recipe       {recipe.name}"]
    for slot in PARTS:
        part: Part = getattr(recipe, slot)
        if isinstance(part, StrEnum):
            lines.append(f"{slot:<12} {part.value}")
            continue
        parameters = ", ".join(f"{key}={value}" for key, value in _parameters(part).items())
        lines.append(f"{slot:<12} {part.kind}" + (f" ({parameters})" if parameters else ""))
    lines.append(f"corrects lag {'yes' if recipe.corrects_lag else 'no'}")
    return "\n".join(lines)


def _flatten(overrides: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}".removesuffix(".kind"), value


def _override(recipe: Recipe, key: str, value: object) -> Recipe:
    if key == "allow_no_correction":
        if not isinstance(value, bool):
            raise RecipeError(f"correction.{key}: expected true or false, got {value!r}")
        return dataclasses.replace(recipe, allow_no_correction=value)
    slot, dot, parameter = key.partition(".")
    if slot not in PARTS:
        known = ", ".join([*PARTS, "allow_no_correction"])
        raise RecipeError(f"correction: unknown override {key!r}; there are {known}")
    part = _with_parameter(recipe, slot, parameter, value) if dot else _part(slot, value)
    return dataclasses.replace(recipe, **{slot: part})  # type: ignore[arg-type]


def _part(slot: str, value: object) -> Part:
    kinds = PARTS[slot]
    if not isinstance(value, str) or value not in kinds:
        raise RecipeError(f"correction.{slot}: unknown {value!r}; there are {', '.join(kinds)}")
    return kinds[value]


def _with_parameter(recipe: Recipe, slot: str, parameter: str, value: object) -> Part:
    part: Part = getattr(recipe, slot)
    key = f"correction.{slot}.{parameter}"
    parameters = {} if isinstance(part, StrEnum) else _parameters(part)
    if isinstance(part, StrEnum) or parameter not in parameters:
        known = ", ".join(parameters) or "none"
        kind = part.value if isinstance(part, StrEnum) else part.kind
        raise RecipeError(f"{key}: {kind!r} has no such parameter; it has {known}")
    converted = _convert(key, value, parameters[parameter])
    return dataclasses.replace(part, **{parameter: converted})  # type: ignore[arg-type]


def _parameters(part: Advantage | Weight | Surrogate) -> dict[str, object]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _convert(key: str, value: object, current: object) -> object:
    """`value` as the type of the current one; whole numbers may stand for floats."""
    if isinstance(current, StrEnum):
        kinds = [member.value for member in type(current)]
        if value not in kinds:
            raise RecipeError(f"{key}: unknown {value!r}; there are {', '.join(kinds)}")
        return type(current)(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if isinstance(current, float) else value
    if isinstance(value, float) and isinstance(current, float):
        return value
    raise RecipeError(f"{key}: expected {type(current).__name__}, got {value!r}")


def _check_combination(recipe: Recipe) -> None:
    bypass = recipe.proximal is Proximal.BEHAVIOUR
    weighted = not isinstance(recipe.weight, NoWeight)
    if bypass and recipe.surrogate.has_ratio and weighted:
        raise RecipeError(
            f"correction: proximal = behaviour puts theta/mu inside {recipe.surrogate.kind}; a "
            "weight beside it counts the ratio twice. Set weight = none or proximal = recompute"
        )
    if bypass and recipe.weight.kind == ProximalBehaviourWeight.kind:
        raise RecipeError(
            "correction: proximal = behaviour makes prox/mu equal to 1, so this weight corrects "
            "nothing. Set weight = target_behaviour or proximal = recompute"
        )
    if isinstance(recipe.weight, TargetBehaviourWeight) and recipe.surrogate.has_ratio:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} holds theta/prox; the weight theta/mu counts it "
            "twice. Set weight = proximal_behaviour or surrogate = reinforce"
        )
    _check_whole_sequence(recipe)


def _check_whole_sequence(recipe: Recipe) -> None:
    """GSPO decides a trajectory at a time: its loss must count trajectories, not tokens."""
    if not recipe.surrogate.whole_sequence:
        return
    if recipe.aggregation is not Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} has one loss a trajectory, {recipe.aggregation} "
            "would weigh it by length. Set aggregation = sequence_mean_token_mean"
        )
    one_weight = recipe.weight.level in (Level.GEOMETRIC, Level.SEQUENCE_PRODUCT)
    if not isinstance(recipe.weight, NoWeight) and not one_weight:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} has one ratio a trajectory, the weight is taken "
            f"at level {recipe.weight.level}. Set weight.level = geometric or sequence_product"
        )


def _check_run(recipe: Recipe, max_lag_versions: int, group_size: int) -> None:
    if max_lag_versions > 0 and not (recipe.corrects_lag or recipe.allow_no_correction):
        raise RecipeError(
            f"correction.recipe: {recipe.name!r} corrects for no lag and max_lag is "
            f"{max_lag_versions}. Set max_lag = 0, or a recipe that corrects (decoupled_ppo, "
            "gspo, ppo_bypass), or allow_no_correction = true to do without"
        )
    if recipe.advantage.needs_group and group_size < 2:
        raise RecipeError(
            f"correction.advantage: {recipe.advantage.kind} needs groups of at least 2, group_size "
            f"is {group_size}. Set a larger group_size or advantage = return"
        )
