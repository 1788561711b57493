"""How overrides of a recipe are read: which part stands in a slot, with which parameters.

An override names a slot (`"surrogate": "gspo"`, a fresh part with its default parameters) or a
parameter of the part in a slot (`"surrogate.clip_high": 0.28`). Nested mappings, as TOML tables
give them, mean the same; `kind` inside a table names the part.

Slots that hold several parts (trust, penalties, shaping) take a list of kinds (`"trust": ["m2",
"veto"]`, `[]` for none), which keeps what the recipe has of them, and parameters by kind
(`"trust.m2.limit": 0.04`); a parameter of a kind that is not there adds it, and so does `{}`.

Everything unknown is refused, also a parameter that exists but would have no effect.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from correction.errors import RecipeError
from correction.parts import PARTS, SEVERAL, Part, kind_of, parameters_of

UNBOUNDED = frozenset({"high", "rho_bar", "c_bar", "pg_rho_bar"})
"""Parameters that may be infinite: bounds that are then none."""

Parts = Mapping[str, Part | tuple[Part, ...]]


def flatten(overrides: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values of possibly nested overrides; `slot.kind` becomes `slot`."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}".removesuffix(".kind"), value


def apply_overrides(parts: Parts, flat: Mapping[str, object]) -> dict[str, Any]:
    """What stands in every slot after the overrides. `parts`: what the recipe has, by slot.

    Parameters of one part are set together, so that only their final combination is judged.
    Raises RecipeError that names the key and what there is instead.
    """
    for key in flat:
        if key.partition(".")[0] not in parts:
            known = ", ".join([*parts, "allow_no_correction"])
            raise RecipeError(f"correction: unknown override {key!r}; there are {known}")
    return {slot: _slot(slot, standing, flat) for slot, standing in parts.items()}


def _slot(
    slot: str, standing: Part | tuple[Part, ...], flat: Mapping[str, object]
) -> Part | tuple[Part, ...]:
    prefix = f"{slot}."
    wanted = {key.removeprefix(prefix): flat[key] for key in flat if key.startswith(prefix)}
    if isinstance(standing, tuple):
        return _several(slot, standing, flat.get(slot), wanted)
    if slot in flat:
        standing = _named(f"correction.{slot}", PARTS[slot], flat[slot])
    return _with_parameters(f"correction.{slot}", standing, wanted) if wanted else standing


def _several(
    slot: str, standing: tuple[Part, ...], named: object, wanted: Mapping[str, object]
) -> tuple[Part, ...]:
    """The parts of a slot that holds any number of them."""
    kinds = SEVERAL[slot]
    key = f"correction.{slot}"
    if named is not None:
        names = named if isinstance(named, list | tuple) else [named]
        before = {kind_of(part): part for part in standing}
        found = [_named(key, kinds, name) for name in names]
        standing = tuple(before.get(kind_of(part), part) for part in found)
    chosen = {kind_of(part): part for part in standing}
    if len(chosen) < len(standing):
        raise RecipeError(f"{key}: a kind stands in {named} twice")
    by_kind: dict[str, dict[str, object]] = {}
    for path, value in wanted.items():
        kind, dot, name = path.partition(".")
        if value == {}:  # an empty table: the kind with its defaults
            by_kind.setdefault(kind, {})
            continue
        if not dot:
            raise RecipeError(f"{key}.{path}: name a kind and a parameter, as {key}.KIND.PARAMETER")
        by_kind.setdefault(kind, {})[name] = value
    for kind, parameters in by_kind.items():
        part = chosen.get(kind) or _named(key, kinds, kind)
        chosen[kind] = _with_parameters(f"{key}.{kind}", part, parameters)
    return tuple(chosen.values())


def _named(key: str, kinds: Mapping[str, Part], kind: object) -> Part:
    if not isinstance(kind, str) or kind not in kinds:
        raise RecipeError(f"{key}: unknown {kind!r}; there are {', '.join(kinds)}")
    return kinds[kind]


def _with_parameters(key: str, part: Part, wanted: Mapping[str, object]) -> Part:
    if isinstance(part, StrEnum):
        raise RecipeError(f"{key}: {part.value!r} has no parameters, got {[*wanted]}")
    fields = {field.name for field in dataclasses.fields(part)}
    changes: dict[str, Any] = {}
    for name, value in wanted.items():
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise RecipeError(f"{key}.{name}: {part.kind!r} has no such parameter; it has {known}")
        changes[name] = _convert(f"{key}.{name}", value, getattr(part, name))
    changed = dataclasses.replace(part, **changes)
    if idle := wanted.keys() - parameters_of(changed).keys():
        used = ", ".join(f"{name}={value}" for name, value in parameters_of(changed).items())
        raise RecipeError(f"{key}.{min(idle)}: has no effect beside {used}; remove it")
    return changed


def _convert(key: str, value: object, current: object) -> object:
    """`value` as the type of the current one; whole numbers may stand for floats."""
    if isinstance(current, StrEnum):
        kinds = [member.value for member in type(current)]
        if value not in kinds:
            raise RecipeError(f"{key}: unknown {value!r}; there are {', '.join(kinds)}")
        return type(current)(value)
    if isinstance(current, bool):
        if isinstance(value, bool):
            return value
    elif isinstance(value, int) and not isinstance(value, bool):
        return float(value) if isinstance(current, float) else value
    elif isinstance(value, float) and isinstance(current, float):
        if math.isnan(value) or (math.isinf(value) and key.rpartition(".")[2] not in UNBOUNDED):
            raise RecipeError(f"{key}: must be finite, got {value}")
        return value
    raise RecipeError(f"{key}: expected {type(current).__name__}, got {value!r}")
