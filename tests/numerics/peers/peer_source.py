"""Single functions of public packages, taken out of their source by name.

The packages want dozens of others (datasets, omegaconf, tensordict, gymnasium) that the functions
do not. So nothing of a package is imported: its file is parsed, the named functions, classes and
constants are cut out, with annotations unread and without decorators (`torch.no_grad` stays), and
run in a namespace that holds just what they call. `make peers` puts the packages into
`.cache/peers`, at the versions of the extra `peers`; Ray is installed anyway.
"""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".cache" / "peers"


def pinned() -> dict[str, str]:
    """Versions of the extra `peers`, by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (pin.partition("==") for pin in project["optional-dependencies"]["peers"])
    return {package: version for package, _, version in pins}


def missing_reason(package: str) -> str | None:
    """Why the functions of `package` cannot be had here; None where they can."""
    version = pinned()[package]
    if (FOLDER / f"{package}-{version}.dist-info").is_dir():
        return None
    return f"{package} {version} is not in .cache/peers: run `make peers`"


needs = {
    package: pytest.mark.skipif(
        missing_reason(package) is not None, reason=missing_reason(package) or ""
    )
    for package in pinned()
}
"""Marks of tests: skipped with the reason where the package is not there."""


def ray_file(path: str) -> Path:
    """A file of the installed Ray."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / path


def load(path: Path, names: set[str], given: Mapping[str, object] | None = None) -> SimpleNamespace:
    """The named functions, classes and constants of a file, methods too, as one namespace.

    given: what they call beside torch, numpy, math and each other.
    """
    found = [_bare(node) for node in ast.walk(ast.parse(path.read_text())) if _name(node) in names]
    missing = names - {_name(node) for node in found}
    assert not missing, f"{path} has no {missing}"
    unread = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module([*unread, *found], type_ignores=[]))
    namespace: dict[str, Any] = {**_common(), **(given or {})}
    exec(compile(module, str(path), "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


def _common() -> dict[str, object]:
    import functools
    import math

    return {
        "torch": torch,
        "np": np,
        "math": math,
        "functools": functools,
        "defaultdict": defaultdict,
        "partial": partial,
        "Any": Any,
    }


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def _bare(node: ast.AST) -> ast.stmt:
    assert isinstance(node, ast.stmt)
    if isinstance(node, ast.FunctionDef):
        node.decorator_list = [
            each for each in node.decorator_list if ast.unparse(each) == "torch.no_grad()"
        ]
    return node
