"""The starter policy: a small model that half solves the calculator task, made on this machine.

Nothing is downloaded: architecture (Qwen3, 0.8M parameters, tied head), character tokenizer and
warm start are made here and cached. The cache key covers every setting, the seed, the library
versions and the source of the modules that decide the result; a finished folder appears in one
rename, so that a killed or a second run never leaves a half-written model behind.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from actors.environments import calculator
from actors.environments.calculator import CalculatorFamily
from learner import starter_success, starter_tokenizer, starter_training
from learner.starter_success import SuccessMeter
from learner.starter_tokenizer import save_tokenizer
from learner.starter_training import (
    DemonstrationDeck,
    Report,
    StarterSettings,
    build_model,
    train,
)

RESULT_FILE = "starter.json"
"""Beside the model: settings, seed, seconds, loss and the measured success."""

_DECIDING_MODULES = (calculator, starter_success, starter_tokenizer, starter_training)
_DECIDING_LIBRARIES = ("torch", "transformers", "tokenizers")


def make_starter(
    cache_dir: Path,
    *,
    seed: int,
    report: Report,
    threads: int,
    settings: StarterSettings | None = None,
) -> Path:
    """Folder of the starter policy of this seed; made on the first call, reused later.

    report: called after every optimiser step with (done, total, loss); not called on reuse.
    threads: CPU threads to train with. It loads with transformers' Auto classes and with vLLM.
    """
    settings = settings or StarterSettings()
    destination = cache_dir / f"starter-{cache_key(settings, seed)}"
    if not destination.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _torch_state(threads, seed), _appearing(destination) as folder:
            _make(folder, settings, seed, report)
    return destination


def read_result(folder: Path) -> dict[str, object]:
    """What was measured when the starter in `folder` was made."""
    result: dict[str, object] = json.loads((folder / RESULT_FILE).read_text())
    return result


def cache_key(settings: StarterSettings, seed: int) -> str:
    """Hex digest over everything that decides the starter policy."""
    digest = hashlib.sha256(json.dumps([asdict(settings), seed], sort_keys=True).encode())
    for module in _DECIDING_MODULES:
        digest.update(Path(str(module.__file__)).read_bytes())
    for library in _DECIDING_LIBRARIES:
        digest.update(f"{library}={importlib.metadata.version(library)}".encode())
    return digest.hexdigest()[:16]


def _make(folder: Path, settings: StarterSettings, seed: int, report: Report) -> None:
    began = time.monotonic()
    family = CalculatorFamily()
    tokenizer = save_tokenizer(folder, settings.max_context_tokens)
    model = build_model(settings, tokenizer)
    loss = train(model, DemonstrationDeck(settings, tokenizer, family, seed), settings, report)
    success = SuccessMeter(model, tokenizer, family).measure(
        split="heldout", episodes=settings.heldout_tasks, seed=seed
    )
    with _quiet():
        model.save_pretrained(folder)
    result = {
        "settings": asdict(settings),
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "made_in_s": round(time.monotonic() - began, 2),
        "loss": loss,
        "heldout": asdict(success),
    }
    (folder / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")


@contextmanager
def _appearing(destination: Path) -> Iterator[Path]:
    """A folder beside `destination` that becomes it, in one rename, if the body succeeds."""
    folder = Path(tempfile.mkdtemp(prefix=".making-", dir=destination.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp makes it private
        try:
            os.rename(folder, destination)
        except OSError:
            if not destination.is_dir():  # else another process made the same one first
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own progress bar off the caller's terminal."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _torch_state(threads: int, seed: int) -> Iterator[None]:
    """Seed torch and bound its threads for a while; both are put back."""
    before = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
