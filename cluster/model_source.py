"""From `model.path` to a folder that learner and engines load: starter, local folder, id.

What cannot be trained and swapped is refused here, before anything starts.
"""

from __future__ import annotations

import json
from pathlib import Path

from cluster.config import RunConfig
from cluster.observing.events import Observer
from correction.errors import ConfigError

STARTER = "starter"
CACHE = Path(".cache")
"""Where starters are kept, under the working folder."""


def model_folder(config: RunConfig, observer: Observer) -> Path:
    """Folder of the model to start from; made first where it is the starter."""
    found = find_model(config)
    folder = _starter(config.run.seed, observer) if found is None else found
    return folder.absolute()  # Ray actors have working folders of their own


def find_model(config: RunConfig) -> Path | None:
    """Folder of a model that is there, None for the starter, which is made.

    Raises ConfigError for a folder that is none, or a model whose weights cannot be swapped.
    """
    if config.model.path == STARTER:
        return None
    folder = Path(config.model.path)
    if not folder.is_dir():
        folder = _cached_folder("model.path", config.model.path, config.model.revision)
    check_swappable(folder)
    return folder


def check_swappable(folder: Path) -> None:
    """Refuse models whose trained weights an engine cannot take over while it runs."""
    try:
        description = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {folder} holds no readable config.json") from error
    architectures = description.get("architectures") or []
    if not any(str(name).endswith("ForCausalLM") for name in architectures):
        raise ConfigError(
            f"model.path: {folder} is a {architectures or 'model without architecture'}; "
            "a causal language model is needed (…ForCausalLM)"
        )
    if description.get("quantization_config"):
        raise ConfigError(
            f"model.path: {folder} is quantised, so that its weights and its head cannot be "
            "swapped; dequantise it first (docs/run.md)"
        )


def check_helper_model(key: str, path: str) -> None:
    """Refuse a critic or reference that is not there. key: of the configuration."""
    if not Path(path).is_dir():
        _cached_folder(key, path, None)


def longest_context_tokens(folder: Path) -> int | None:
    """Longest context that the model was made for; None where it does not say."""
    description = json.loads((folder / "config.json").read_text())
    found = description.get("text_config", description).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _starter(seed: int, observer: Observer) -> Path:
    """The demo's own policy, made once a seed."""
    from learner.starter import make_starter, read_result

    told = 0

    def report(done: int, total: int, loss: float) -> None:
        nonlocal told
        if done * 10 // total > told:
            told = done * 10 // total
            observer.on_message("info", f"starter policy: {done}/{total} steps, loss {loss:.3f}")

    folder = make_starter(CACHE, seed=seed, report=report, threads=1)
    heldout = read_result(folder)["heldout"]
    observer.on_message("info", f"starter policy {folder}, held out: {heldout}")
    return folder


def _cached_folder(key: str, path: str, revision: str | None) -> Path:
    """A transformers id that is in the local cache; nothing is downloaded at run time."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(path, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError) as error:
        raise ConfigError(
            f"{key}: {path!r} is neither a folder nor a transformers id in the "
            "local cache; download it first or give a folder"
        ) from error
    return Path(found)
