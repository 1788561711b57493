"""The policy as a transformers model: loading it for training, putting it together, writing it.

A folder that `write_policy` made loads in transformers and in vLLM: config, safetensors under the
model's own names, and the tokenizer files of the folder that training began with.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from correction.errors import ConfigError, RunError
from learner.settings import LearnerSettings

TEXT_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)
"""What beside weights and config belongs to a model folder."""

CANARY_TOKENS = 16
"""Of the prompt whose logprobs prove a swap."""


def load_policy(settings: LearnerSettings, path: str | None = None) -> Any:  # noqa: ANN401
    """A transformers causal language model in the training dtype, without dropout.

    path: another folder or transformers id than `settings.model_path`. Dropout would make the
    target policy another one than the engines', which have none. Raises ConfigError for a model
    without an output head.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = path or settings.model_path
    config = AutoConfig.from_pretrained(path)
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=getattr(torch, settings.dtype)
    )
    if model.get_output_embeddings() is None:
        raise ConfigError(f"model_path: {path} has no output head to train")
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def plain_policy(training: Any, weights: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """A model of its own around given weights, in their dtype, without copying or initialising.

    training: the model in training, for its config and for buffers that no state dict holds.
    weights: as `full_state` gives them, a tied weight once. Raises RunError where a weight is
    missing or unknown.
    """
    from transformers import AutoModelForCausalLM

    dtype = next(iter(weights.values())).dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(training.config, dtype=dtype)
    for name, buffer in training.named_buffers():
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._buffers[leaf] = buffer.detach().cpu()
    _, unknown = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    if missing or unknown:
        raise RunError(f"policy: weights missing {missing}, unknown {unknown}")
    return model.eval()


def likely_ids(model: Any, seed: int) -> tuple[int, ...]:  # noqa: ANN401
    """CANARY_TOKENS: a random one, then those that the model itself finds likeliest.

    On tokens that the policy would hardly write, bfloat16 alone puts two correct engines up to 1.2
    nats apart; on these 0.3, while one wrong matrix shows with 8 or more (measured: SmolLM2-135M,
    vLLM against transformers).
    """
    ids = [random.Random(seed).randrange(model.config.get_text_config().vocab_size)]
    with torch.no_grad():
        while len(ids) < CANARY_TOKENS:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return tuple(ids)


def score_plain(model: Any, token_ids: Iterable[int]) -> list[float]:  # noqa: ANN401
    """Logprobs at temperature 1 of token_ids[1:] under a plain model, log-softmax in fp32."""
    ids = torch.tensor([list(token_ids)], dtype=torch.int64)
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), dim=-1)
    values: list[float] = table[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return values


def write_policy(model: Any, source: str, folder: Path) -> None:  # noqa: ANN401
    """Write a plain model and the text files of `source` as a folder, whole or not at all.

    An existing folder is replaced. source: local folder or transformers id.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    _write_text_files(source, partial)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)


def _write_text_files(source: str, folder: Path) -> None:
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        return
    for pattern in TEXT_FILES:
        for path in Path(source).glob(pattern):
            shutil.copy2(path, folder / path.name)
