"""What the docs say exists, exists: commands, targets, keys, files, environments, recipes."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from cluster.__main__ import _parser
from cluster.config import parse_config

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in DOCS]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", DOCS, ids=IDS)
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(r"`((?:correction|actors|learner|cluster|deploy|tests|docs)/[\w./]+)`", text)
    missing += [name for name in named if not (ROOT / name.rstrip("/")).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCS, ids=IDS)
def test_make_targets_exist(path: Path) -> None:
    named = re.findall(r"(?:`|^\$ )make ([a-z0-9-]+)", path.read_text(), re.MULTILINE)
    assert set(named) <= TARGETS


@pytest.mark.parametrize("path", DOCS, ids=IDS)
def test_commands_parse_and_their_keys_are_known(path: Path) -> None:
    for line in re.findall(r"^(?:\$ )?(?:lagwise|python -m cluster) (.+)$", path.read_text(), re.M):
        words = shlex.split(line.split("#")[0])
        if any(word.isupper() for word in words):
            continue  # a form, not a command
        options = _parser().parse_args(words)
        if config := getattr(options, "config", None):
            assert (ROOT / config).is_file()
        for override in getattr(options, "overrides", []):
            key, _, value = override.partition("=")
            section, _, name = key.partition(".")
            parse_config({section: {name: tomllib.loads(f"v = {value}")["v"]}})
