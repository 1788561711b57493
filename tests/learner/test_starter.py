"""The starter policy: tokenizer, warm start, cache."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner import starter
from learner.starter import make_starter, read_result
from learner.starter_tokenizer import build_tokenizer
from learner.starter_training import (
    IGNORED,
    StarterSettings,
    action_loss,
    build_model,
    collate,
    demonstrate,
)

TOKENIZER = build_tokenizer(64)
SHORT = StarterSettings(
    hidden=32,
    layers=1,
    heads=2,
    key_value_heads=1,
    feed_forward=32,
    steps=20,
    warmup_steps=2,
    batch_episodes=8,
    demonstrated_tasks=20,
    heldout_tasks=4,
)


def silent(done: int, total: int, loss: float) -> None:
    """Nothing to show."""


@given(st.text())
def test_the_tokenizer_rewrites_nothing(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    if not any(special in text for special in TOKENIZER.all_special_tokens):
        assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.sampled_from(list("0123456789+-*[]{}=? ab")), max_size=20), st.integers(0, 20))
def test_text_encodes_to_the_same_tokens_in_pieces(characters: list[str], cut: int) -> None:
    text = "".join(characters)
    pieces = [TOKENIZER.encode(part, add_special_tokens=False) for part in (text[:cut], text[cut:])]
    assert TOKENIZER.encode(text, add_special_tokens=False) == pieces[0] + pieces[1]


def test_only_what_the_policy_writes_is_learnt() -> None:
    example = demonstrate("3+4*5", TOKENIZER, additive_first=False)
    assert TOKENIZER.decode(example.token_ids) == "<bos>3+4*5[4*5]{20}[3+20]{23}=23<eos>"
    _, labels = collate([example, demonstrate("12+34*56", TOKENIZER, additive_first=True)])
    assert TOKENIZER.decode(labels[0][labels[0] != IGNORED]) == "[4*5][3+20]=23<eos>"
    assert TOKENIZER.decode(labels[1][labels[1] != IGNORED]) == "[12+34][46*56]=2576<eos>"


def test_padding_does_not_change_the_loss() -> None:
    torch.manual_seed(0)
    model = build_model(SHORT, TOKENIZER)
    short = demonstrate("3+4*5", TOKENIZER, additive_first=False)
    long = demonstrate("12+34*56", TOKENIZER, additive_first=False)
    alone = [action_loss(model, *collate([example])) for example in (short, long)]
    counts = [sum(example.action_mask) for example in (short, long)]
    mean = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(action_loss(model, *collate([short, long])), mean)


def test_a_short_warm_start_improves_and_is_what_was_saved(tmp_path: Path) -> None:
    heard: list[tuple[int, int, float]] = []
    folder = make_starter(
        tmp_path, seed=0, report=lambda *step: heard.append(step), threads=1, settings=SHORT
    )
    assert [done for done, _, _ in heard] == list(range(1, SHORT.steps + 1))
    assert heard[-1][2] < 0.8 * heard[0][2]
    result = read_result(folder)
    assert result["seed"] == 0
    heldout = result["heldout"]
    assert isinstance(heldout, dict)
    assert heldout["episodes"] == SHORT.heldout_tasks

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    example = demonstrate("3+4*5", tokenizer, additive_first=False)
    assert example == demonstrate("3+4*5", TOKENIZER, additive_first=False)
    assert action_loss(model, *collate([example])).item() < heard[0][2]


def test_a_made_starter_is_reused_and_another_seed_is_another(tmp_path: Path) -> None:
    made = make_starter(tmp_path, seed=0, report=silent, threads=1, settings=SHORT)
    weights = (made / "model.safetensors").read_bytes()

    def unexpected(done: int, total: int, loss: float) -> None:
        raise AssertionError("made again")

    again = make_starter(tmp_path, seed=0, report=unexpected, threads=2, settings=SHORT)
    assert again == made
    other = make_starter(tmp_path, seed=1, report=silent, threads=1, settings=SHORT)
    assert other != made
    assert (other / "model.safetensors").read_bytes() != weights


def test_a_seed_decides_the_weights_and_the_caller_keeps_its_torch_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    folders = [
        make_starter(tmp_path / name, seed=3, report=silent, threads=1, settings=SHORT)
        for name in ("first", "second")
    ]
    first, second = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == second
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("step", [1, SHORT.steps])
def test_a_run_that_dies_leaves_nothing_behind(tmp_path: Path, step: int) -> None:
    def dies(done: int, total: int, loss: float) -> None:
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_starter(tmp_path, seed=0, report=dies, threads=1, settings=SHORT)
    assert list(tmp_path.iterdir()) == []


def test_the_slower_of_two_runs_takes_what_the_faster_one_made(tmp_path: Path) -> None:
    def overtaken(done: int, total: int, loss: float) -> None:
        if done == 1:
            make_starter(tmp_path, seed=0, report=silent, threads=1, settings=SHORT)

    folder = make_starter(tmp_path, seed=0, report=overtaken, threads=1, settings=SHORT)
    assert list(tmp_path.iterdir()) == [folder]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize(
    "change", [lambda s: replace(s, steps=21), lambda s: replace(s, right_order_share=0.6)]
)
def test_every_setting_is_part_of_the_cache_key(
    change: Callable[[StarterSettings], StarterSettings],
) -> None:
    assert starter.cache_key(SHORT, 0) != starter.cache_key(change(SHORT), 0)
