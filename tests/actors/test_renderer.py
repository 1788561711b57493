"""Text to ids and back: sampled ids are carried, never encoded again."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from actors.environments.calculator import CalculatorFamily
from actors.environments.reasoning_gym import ReasoningGymFamily
from actors.renderer import ChatRenderer, PlainRenderer, make_renderer
from correction.errors import ConfigError

APPENDING = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
FORGETFUL = (  # drops what the assistant wrote as soon as somebody answers, as thinking models do
    "{% for m in messages %}<s>{{ m.role }}:"
    "{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
OPEN_ENDED = APPENDING.replace("</s>", "")
OTHER_PROMPT = APPENDING.replace("<s>assistant:{% endif %}", "<s>you:{% endif %}")


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("a", "b"), ("ab", "c")]  # several ways to write "abc"
    vocabulary = {token: at for at, token in enumerate([*alphabet, "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_plain_text_begins_with_the_beginning_token_and_nothing_else_is_added() -> None:
    tokenizer = byte_tokenizer()
    renderer = PlainRenderer(tokenizer, ("]",))
    assert tokenizer.decode(renderer.prompt_ids("1+2")) == "<s>1+2"
    assert tokenizer.decode(renderer.observation_ids("{3}", 1)) == "{3}"
    assert renderer.stop_token_ids == (1, ids(tokenizer, "]")[0])


@given(st.text(max_size=20))
def test_plain_text_of_an_environment_is_never_a_special_token(text: str) -> None:
    tokenizer = byte_tokenizer()
    renderer = PlainRenderer(tokenizer, ())
    observed = renderer.observation_ids(text + "</s>", 1)
    assert not set(observed) & set(tokenizer.all_special_ids)
    assert renderer.action_text(observed) == text + "</s>"


def test_an_action_reads_the_same_however_it_was_sampled() -> None:
    tokenizer = byte_tokenizer()
    renderer = PlainRenderer(tokenizer, ())
    spelt = [tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "c", "</s>")]
    joined = [tokenizer.convert_tokens_to_ids(token) for token in ("abc", "</s>")]
    assert renderer.action_text(spelt) == renderer.action_text(joined) == "abc"


def test_a_chat_that_is_carried_equals_the_template_of_the_whole_chat() -> None:
    tokenizer = byte_tokenizer(APPENDING)
    renderer = ChatRenderer(tokenizer, ())
    carried = renderer.prompt_ids("one?")
    action = [*ids(tokenizer, "yes"), tokenizer.eos_token_id]
    carried += action + renderer.observation_ids("two?", action[-1])
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "two?"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert tokenizer.decode(carried) == whole
    assert carried == ids(tokenizer, whole)


def test_a_chat_turn_that_ended_at_a_stop_text_is_closed_outside_the_action() -> None:
    tokenizer = byte_tokenizer(APPENDING)
    renderer = ChatRenderer(tokenizer, ("]",))
    after_stop = renderer.observation_ids("two?", ids(tokenizer, "]")[0])
    after_end = renderer.observation_ids("two?", tokenizer.eos_token_id)
    assert after_stop == [tokenizer.eos_token_id, *after_end]
    assert tokenizer.decode(after_stop) == "</s>\n<s>user:two?</s>\n<s>assistant:"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (FORGETFUL, "rewrites earlier turns"),
        (OTHER_PROMPT, "rewrites earlier turns"),
        (OPEN_ENDED, "closes no turn with the end token"),
    ],
)
def test_a_template_that_cannot_be_carried_is_refused_at_once(template: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ChatRenderer(byte_tokenizer(template), ())


@pytest.mark.parametrize("kind", [PlainRenderer, ChatRenderer])
def test_a_stop_text_must_be_one_token(kind: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match="stop text 'xy' is 2 tokens"):
        kind(byte_tokenizer(APPENDING), ("xy",))


@pytest.mark.parametrize(("template", "kind"), [(None, PlainRenderer), (APPENDING, ChatRenderer)])
def test_the_model_folder_decides_the_kind(
    tmp_path: Path, template: str | None, kind: type[object]
) -> None:
    byte_tokenizer(template).save_pretrained(tmp_path)
    renderer = make_renderer(tmp_path, CalculatorFamily())
    assert isinstance(renderer, kind)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.decode(renderer.prompt_ids("1+2")).startswith("<s>")
    assert ids(loaded, "]")[0] in renderer.stop_token_ids
    assert ReasoningGymFamily.stop_texts == ()


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no end token"):
        make_renderer(tmp_path, CalculatorFamily())
