"""Pretraining text for the mix of InstructGPT (PPO-ptx): blocks of tokens from a local file.

    file ──texts──▶ tokens of all texts, an end-of-text after each ──cut──▶ blocks [n, T]
         ──shuffled anew each epoch, by seed──▶ step `position` takes the next blocks, ranks share

Which blocks a step trains on is a function of the seed and the position alone, and of nothing that
happened before: a run that goes on needs no state but its step, and any number of ranks trains on
the same blocks. A block may hold the end of one text and the start of another, as in pretraining.

The whole file is tokenised by every rank at the start and held as int32: 4 bytes a token. What is
left over at the end of the file and fills no block is not used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from correction.errors import ConfigError
from learner.settings import PretrainingSettings, RankPlace

MAX_FILE_BYTES = 2**30
"""Of a file that is tokenised at the start: minutes, and some gigabytes of memory, at the most."""

TEXTS_AT_ONCE = 256
"""That a tokenizer gets in one call; it spreads them over threads."""

Blocks = npt.NDArray[np.int32]


class PretrainingStream:
    """The blocks of one file, by position, for one rank."""

    def __init__(
        self, blocks: Blocks, settings: PretrainingSettings, *, seed: int, place: RankPlace
    ) -> None:
        """blocks: int32 [n, block_tokens], n >= 1. Raises ConfigError where the ranks cannot share.

        Every rank gets the same number of blocks, because a backward pass may hold a collective.
        """
        settings.check_shared(place.world_size)
        self.blocks_per_step = settings.blocks_per_step
        self._blocks = blocks
        self._seed = seed
        self._place = place
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @property
    def predicted_tokens_per_step(self) -> int:
        """Tokens of all ranks that a step's cross-entropy is over: all but the first of a block."""
        return self.blocks_per_step * int(self._blocks.shape[1] - 1)

    @property
    def blocks_per_epoch(self) -> int:
        """Blocks in the file."""
        return len(self._blocks)

    def take(self, position: int) -> Tensor:
        """This rank's blocks of one step, int64 [B, T] on the CPU, without padding.

        position: steps before it, from 0; any counter that a run keeps. B: blocks_per_step over
        the number of ranks.
        """
        first = position * self.blocks_per_step
        mine = range(first + self._place.rank, first + self.blocks_per_step, self._place.world_size)
        rows = [
            self._order(number // len(self._blocks))[number % len(self._blocks)] for number in mine
        ]
        return torch.from_numpy(self._blocks[rows].astype(np.int64))

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._blocks))


def open_stream(
    settings: PretrainingSettings, *, model_path: str, seed: int, place: RankPlace
) -> PretrainingStream:
    """Read, tokenise and cut the file with the tokenizer of a model.

    model_path: folder or transformers id. Raises ConfigError for a file that is missing, too large,
    not of its kind, without the field, or shorter than one block, and for a tokenizer without an
    end-of-text token.
    """
    from transformers import AutoTokenizer

    tokens = tokenise(read_texts(settings), AutoTokenizer.from_pretrained(model_path))
    count = len(tokens) // settings.block_tokens
    if count == 0:
        raise ConfigError(
            f"pretraining.path: {settings.path} holds {len(tokens)} tokens, fewer than one block "
            f"({settings.block_tokens})"
        )
    blocks = tokens[: count * settings.block_tokens].reshape(count, settings.block_tokens)
    return PretrainingStream(blocks, settings, seed=seed, place=place)


def tokenise(texts: Iterable[str], tokenizer: Any) -> npt.NDArray[np.int32]:  # noqa: ANN401
    """All tokens of all texts in a row, each text as the tokenizer begins it and with an end."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("model_path: its tokenizer has no end-of-text token to part texts with")
    parts = [np.empty(0, dtype=np.int32)]
    remaining = iter(texts)
    while some := list(islice(remaining, TEXTS_AT_ONCE)):
        for ids in tokenizer(some, verbose=False)["input_ids"]:
            parts.append(np.array(ids if ids[-1:] == [end] else [*ids, end], dtype=np.int32))
    return np.concatenate(parts)


def read_texts(settings: PretrainingSettings) -> Iterator[str]:
    """The texts of the file in its order, empty ones left out. Raises ConfigError as above.

    .jsonl: one object a line. .txt: UTF-8, texts parted by empty lines. .parquet: one a row.
    """
    path = Path(settings.path)
    if not path.is_file():
        raise ConfigError(f"pretraining.path: there is no file {path}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(
            f"pretraining.path: {path} has {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} "
            "are tokenised at the start. Give a part of it"
        )
    readers = {".jsonl": _json_lines, ".txt": _paragraphs, ".parquet": _parquet_rows}
    try:
        yield from (text for text in readers[path.suffix](path, settings.field) if text.strip())
    except UnicodeDecodeError as error:
        raise ConfigError(f"pretraining.path: {path} is not UTF-8: {error}") from error


def _json_lines(path: Path, field: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _text_of(_parsed(line, path, number), field, f"{path}, line {number}")


def _parsed(line: str, path: Path, number: int) -> object:
    try:
        parsed: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"pretraining.path: {path}, line {number}: not JSON: {error}") from error
    return parsed


def _text_of(record: object, field: str, place: str) -> str:
    if not isinstance(record, dict) or field not in record:
        keys = f"; it has {sorted(record)}" if isinstance(record, dict) else ""
        raise ConfigError(f"pretraining.field: {place}: no {field!r}{keys}")
    text = record[field]
    if not isinstance(text, str):
        raise ConfigError(f"pretraining.field: {place}: {field!r} is not text")
    return text


def _paragraphs(path: Path, _field: str) -> Iterator[str]:
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                lines.append(line)
            else:
                yield "".join(lines).rstrip("\n")
                lines = []
    yield "".join(lines).rstrip("\n")


def _parquet_rows(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"pretraining.path: {path} is not Parquet: {error}") from error
    with file:
        if field not in file.schema_arrow.names:
            names = sorted(file.schema_arrow.names)
            raise ConfigError(f"pretraining.field: {path}: no {field!r}; it has {names}")
        number = 0
        for batch in file.iter_batches(TEXTS_AT_ONCE, columns=[field]):
            for row in batch.to_pylist():
                number += 1
                yield _text_of(row, field, f"{path}, row {number}")
