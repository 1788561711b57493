"""Problems of a configuration as readable lines: key, value, what is expected, a likely meaning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel

_MAX_VALUE_CHARACTERS = 60

_EXPECTED = {
    "int_type": "expected an integer",
    "int_from_float": "expected an integer",
    "int_parsing_size": "expected a smaller integer",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "string_type": "expected text in quotes",
    "string_too_short": "expected text that is not empty",
    "string_too_long": "expected at most {max_length} characters",
    "string_pattern_mismatch": "expected letters, digits, dot, dash or underscore, at most 64",
    "literal_error": "expected {expected}",
    "greater_than": "expected a number > {gt}",
    "greater_than_equal": "expected a number >= {ge}",
    "less_than": "expected a number < {lt}",
    "less_than_equal": "expected a number <= {le}",
    "tuple_type": "expected a list",
    "missing": "a value is missing",
    "too_long": "expected at most {max_length} values",
    "model_type": "expected a table",
    "dict_type": "expected a table",
    "value_error": "{error}",
}
"""Messages by pydantic's error type, filled from the error's own context."""


def describe_problems(errors: Iterable[Mapping[str, Any]], model: type[BaseModel]) -> list[str]:
    """One line an error, in the order of the file. `model`: what was validated."""
    known = list(_dotted_keys(model))
    return [_describe(error, known) for error in errors]


def _describe(error: Mapping[str, Any], known: Sequence[str]) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "the whole"
    given = f"{key} = {_shown(error['input'])}"
    if error["type"] == "extra_forbidden":
        what = "unknown table" if isinstance(error["input"], dict) else "unknown key"
        return f"{given}: {what}{_did_you_mean(key, known)}"
    if error["type"] == "missing":
        return f"{key}: {_EXPECTED['missing']}"
    template = _EXPECTED.get(error["type"])
    expected = template.format(**error.get("ctx", {})) if template else error["msg"]
    return f"{given}: {expected}"


def _did_you_mean(key: str, known: Sequence[str]) -> str:
    """The same name elsewhere, else a close one nearby, else a close one anywhere."""
    table, _, name = key.rpartition(".")
    elsewhere = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    siblings = [candidate for candidate in known if candidate.rpartition(".")[0] == table]
    near = get_close_matches(key, siblings, n=1, cutoff=0.7)
    anywhere = get_close_matches(key, known, n=1, cutoff=0.8)
    guesses = elsewhere or near or anywhere
    if guesses:
        return f"; did you mean {guesses[0]}?"
    names = ", ".join(candidate.rpartition(".")[2] for candidate in siblings)
    return f"; [{table}] has {names}" if table else f"; there are {names}"


def _dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _dotted_keys(field.annotation, f"{prefix}{name}.")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    if len(text) <= _MAX_VALUE_CHARACTERS:
        return text
    return text[: _MAX_VALUE_CHARACTERS - 3] + "..."
