"""The rules of the house that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("correction", "actors", "learner", "cluster")
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
]
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "pyarrow", "prometheus_client")
FORBIDDEN_WORDS = ("staleness", "stale sample", "old logprob", "rollout worker", "trainer")


def test_floors_are_kept() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["check", "--help"], ["bench", "--help"]]
)
def test_help_is_instant(arguments: list[str]) -> None:
    """No heavy library is loaded to print a help text."""
    code = (
        "import sys\n"
        "from cluster.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: lagwise" in done.stdout


@pytest.mark.parametrize("library", ["vllm", "deepspeed"])
def test_each_engine_library_stands_behind_few_modules(library: str) -> None:
    importers = {
        path.name
        for path in SOURCES
        if re.search(rf"^\s*(import|from) {library}\b", path.read_text(), re.MULTILINE)
    }
    allowed = {
        "vllm": {name for name in importers if name.startswith("vllm_")},
        "deepspeed": {"deepspeed_engine.py"},
    }
    assert importers == allowed[library]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 350
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not text.strip()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"


def test_nothing_is_left_open() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
    found = [str(path.relative_to(ROOT)) for path in SOURCES if marks.search(path.read_text())]
    assert not found


def test_words_are_the_fields_own() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in SOURCES
        for word in FORBIDDEN_WORDS
        if word in path.read_text().lower()
    ]
    assert not found


def test_no_path_of_a_machine_stands_in_the_tree() -> None:
    pattern = re.compile(re.escape(str(ROOT.parent)) + r"/|/root/|/home/[a-z]+/")
    found = [
        str(path.relative_to(ROOT))
        for path in TRACKED
        if path.suffix in {".py", ".toml", ".md", ".sh", ".json", ""}
        and path != Path(__file__)
        and path.is_file()
        and pattern.search(path.read_text(errors="ignore"))
    ]
    assert not found


def test_nothing_is_ever_unpickled() -> None:
    pattern = re.compile(r"pickle\.loads?\b|torch\.load\(|yaml\.load\(|(?<![.\w])(eval|exec)\(")
    found = [str(path.relative_to(ROOT)) for path in SOURCES if pattern.search(path.read_text())]
    assert not found
