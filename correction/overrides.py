"""How overrides of a recipe are read: which part stands in a slot, with which parameters.

An override names a slot (`"surrogate": "gspo"`, a fresh part with its default parameters) or a
parameter of the part in a slot (`"surrogate.clip_high": 0.28`). Nested mappings, as TOML tables
give them, mean the same; `kind` inside a table names the part. Everything unknown is refused,
also a parameter that exists but would have no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from correction.errors import RecipeError
from correction.parts import PARTS, Part, parameters_of


def flatten(overrides: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values of possibly nested overrides; `slot.kind` becomes `slot`."""
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}".removesuffix(".kind"), value


def apply_overrides(parts: Mapping[str, Part], flat: Mapping[str, object]) -> dict[str, Part]:
    """The part of every slot after the overrides. `parts`: those of the recipe, by slot.

    Parameters of one part are set together, so that only their final combination is judged.
    Raises RecipeError that names the key and what there is instead.
    """
    for key in flat:
        if key.partition(".")[0] not in PARTS:
            known = ", ".join([*PARTS, "allow_no_correction"])
            raise RecipeError(f"correction: unknown override {key!r}; there are {known}")
    return {slot: _apply(slot, part, flat) for slot, part in parts.items()}


def _apply(slot: str, part: Part, flat: Mapping[str, object]) -> Part:
    if slot in flat:
        part = _named(slot, flat[slot])
    prefix = f"{slot}."
    wanted = {key.removeprefix(prefix): flat[key] for key in flat if key.startswith(prefix)}
    return _with_parameters(slot, part, wanted) if wanted else part


def _named(slot: str, kind: object) -> Part:
    kinds = PARTS[slot]
    if not isinstance(kind, str) or kind not in kinds:
        raise RecipeError(f"correction.{slot}: unknown {kind!r}; there are {', '.join(kinds)}")
    return kinds[kind]


def _with_parameters(slot: str, part: Part, wanted: Mapping[str, object]) -> Part:
    if isinstance(part, StrEnum):
        raise RecipeError(f"correction.{slot}: {part.value!r} has no parameters, got {[*wanted]}")
    fields = {field.name for field in dataclasses.fields(part)}
    changes: dict[str, Any] = {}
    for name, value in wanted.items():
        key = f"correction.{slot}.{name}"
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise RecipeError(f"{key}: {part.kind!r} has no such parameter; it has {known}")
        changes[name] = _convert(key, value, getattr(part, name))
    changed = dataclasses.replace(part, **changes)
    if idle := wanted.keys() - parameters_of(changed).keys():
        used = ", ".join(f"{name}={value}" for name, value in parameters_of(changed).items())
        raise RecipeError(f"correction.{slot}.{min(idle)}: has no effect beside {used}; remove it")
    return changed


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
