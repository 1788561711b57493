from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from correction.errors import ConfigError
from learner import pretraining
from learner.pretraining import PretrainingStream, open_stream, read_texts, tokenise
from learner.settings import PretrainingSettings, RankPlace
from learner.starter_tokenizer import save_tokenizer

TEXTS = ["one two", "three\nfour five", "six"]
BEGIN, END = 1, 2


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 256)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Any:  # noqa: ANN401
    return PreTrainedTokenizerFast.from_pretrained(model_path)


def write(folder: Path, kind: str, texts: list[str], field: str = "text") -> str:
    path = folder / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"id": 0, field: text}) + "\n" for text in texts))
    elif kind == "txt":
        path.write_text("\n\n".join(texts) + "\n")
    else:
        table = pyarrow.table({"id": range(len(texts)), field: texts})
        pyarrow.parquet.write_table(table, path)
    return str(path)


def settings_of(path: str, **changes: Any) -> PretrainingSettings:  # noqa: ANN401
    return PretrainingSettings(
        **{"path": path, "tokens_per_step": 24, "block_tokens": 6, **changes}
    )


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_every_kind_of_file_gives_the_same_texts(tmp_path: Path, kind: str) -> None:
    settings = settings_of(write(tmp_path, kind, [*TEXTS, " ", "last"]))
    assert list(read_texts(settings)) == [*TEXTS, "last"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_field_can_be_named(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, TEXTS, field="content")
    assert list(read_texts(settings_of(path, field="content"))) == TEXTS


def test_a_text_begins_as_the_tokenizer_says_and_ends_once(tokenizer: Any) -> None:  # noqa: ANN401
    plain = tokenise(["ab", "c"], tokenizer)
    own = [tokenizer.encode(text) for text in ("a", "b", "c")]
    assert plain.tolist() == [*own[0], *own[1], END, *own[2], END]
    assert plain.dtype == np.int32

    class Beginning:
        eos_token_id = END

        def __call__(self, texts: list[str], verbose: bool) -> dict[str, list[list[int]]]:
            return {"input_ids": [[BEGIN, 7, END] for _ in texts]}

    assert tokenise(["x", "y"], Beginning()).tolist() == [BEGIN, 7, END] * 2


def test_blocks_are_the_text_cut_into_pieces(
    tmp_path: Path,
    model_path: str,
    tokenizer: Any,  # noqa: ANN401
) -> None:
    settings = settings_of(write(tmp_path, "jsonl", TEXTS))
    stream = open_stream(settings, model_path=model_path, seed=0, place=RankPlace())
    whole = tokenise(TEXTS, tokenizer)
    assert stream.blocks_per_epoch == len(whole) // 6
    assert len(whole) % 6, "nothing is left over, this test shows less than it should"
    pieces = whole[: len(whole) // 6 * 6].reshape(-1, 6).tolist()
    taken = stream.take(0)
    assert taken.dtype == torch.int64
    assert taken.shape == (4, 6)
    assert sorted(taken.tolist()) == sorted(pieces)
    assert stream.predicted_tokens_per_step == 4 * 5


ALONE = RankPlace()


def numbered(count: int, place: RankPlace = ALONE, *, seed: int = 3) -> PretrainingStream:
    """Block n holds n; six blocks a step."""
    blocks = np.repeat(np.arange(count, dtype=np.int32)[:, None], 2, axis=1)
    settings = settings_of("a.jsonl", block_tokens=2, tokens_per_step=12)
    return PretrainingStream(blocks, settings, seed=seed, place=place)


def taken(stream: PretrainingStream, position: int) -> list[int]:
    numbers: list[int] = stream.take(position)[:, 0].tolist()
    return numbers


def test_an_epoch_holds_every_block_once_in_an_order_of_its_own() -> None:
    stream = numbered(20)
    run = [number for position in range(10) for number in taken(stream, position)]
    epochs = [run[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(20))


def test_a_position_gives_the_same_blocks_whatever_was_taken_before() -> None:
    first, second = numbered(20), numbered(20)
    in_order = [taken(first, position) for position in range(12)]
    for position in (11, 3, 7, 0):
        assert taken(second, position) == in_order[position]
    assert taken(numbered(20, seed=4), 0) != in_order[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_share_the_same_blocks(world_size: int) -> None:
    ranks = [numbered(20, RankPlace(rank, world_size)) for rank in range(world_size)]
    for position in (0, 3, 4):
        shares = [taken(rank, position) for rank in ranks]
        assert {len(share) for share in shares} == {6 // world_size}
        whole = [number for share in shares for number in share]
        assert sorted(whole) == sorted(taken(numbered(20), position))


def test_a_file_smaller_than_a_step_is_gone_through_again() -> None:
    assert sorted(taken(numbered(3), 0)) == [0, 0, 1, 1, 2, 2]


def test_blocks_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tokens_per_step.*6 blocks.*4 learner ranks"):
        numbered(20, RankPlace(0, 4))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', r"line 3: not JSON"),
        ("bad.jsonl", b'["a"]\n', r"pretraining\.field: .*line 1: no 'text'$"),
        ("bad.jsonl", b'{"body": "a", "id": 1}\n', r"line 1: no 'text'; it has \['body', 'id'\]"),
        ("bad.jsonl", b'{"text": null}\n', r"line 1: 'text' is not text"),
        ("bad.txt", b"caf\xe9\n", r"not UTF-8"),
        ("bad.parquet", b"text\n", r"not Parquet"),
        ("bad.jsonl", b"", r"0 tokens, fewer than one block \(6\)"),
        ("bad.txt", b"abcd", r"5 tokens, fewer than one block \(6\)"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(
    tmp_path: Path, model_path: str, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    settings = settings_of(str(tmp_path / name))
    with pytest.raises(ConfigError, match=message):
        open_stream(settings, model_path=model_path, seed=0, place=RankPlace())


def test_a_parquet_file_without_the_column_or_with_numbers_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", TEXTS)
    with pytest.raises(ConfigError, match=r"no 'body'; it has \['id', 'text'\]"):
        list(read_texts(settings_of(path, field="body")))
    with pytest.raises(ConfigError, match="row 1: 'id' is not text"):
        list(read_texts(settings_of(path, field="id")))


def test_a_missing_file_and_one_that_is_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        list(read_texts(settings_of(str(tmp_path / "none.txt"))))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ConfigError, match="there is no file"):
        list(read_texts(settings_of(str(tmp_path / "folder.txt"))))
    monkeypatch.setattr(pretraining, "MAX_FILE_BYTES", 3)
    with pytest.raises(ConfigError, match="Give a part of it"):
        list(read_texts(settings_of(write(tmp_path, "txt", TEXTS))))


def test_a_tokenizer_without_an_end_of_text_is_refused(tokenizer: Any) -> None:  # noqa: ANN401
    from copy import deepcopy

    endless = deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        tokenise(["a"], endless)
