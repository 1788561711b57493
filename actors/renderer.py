"""From an environment's text to token ids and back, so that sampled ids are never encoded again.

Only text that the environment wrote is encoded; what the policy sampled is carried as ids and
decoded once, for the environment to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.environment import EnvironmentFamily
from correction.errors import ConfigError


class Renderer(Protocol):
    """Text <-> ids for one policy and one environment family."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of the whole context before the first turn."""
        ...

    def observation_ids(self, text: str, last_action_id: int) -> list[int]:
        """Ids that follow an action, whose last token is given, before the next turn."""
        ...

    def action_text(self, action_ids: Sequence[int]) -> str:
        """What the policy wrote, without special tokens."""
        ...


class PlainRenderer:
    """Raw text: beginning token, prompt, actions, observations, end to end.

    Text that spells a special token ("<eos>") stays text: only the policy can sample one.
    """

    def __init__(self, tokenizer: Any, stop_texts: Sequence[str]) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self.stop_token_ids = _stop_ids(tokenizer, stop_texts)

    def prompt_ids(self, text: str) -> list[int]:
        """See `Renderer`."""
        begin = self._tokenizer.bos_token_id
        return ([] if begin is None else [begin]) + self._encode(text)

    def observation_ids(self, text: str, last_action_id: int) -> list[int]:
        """See `Renderer`. The text alone: nothing stands between turns."""
        return self._encode(text)

    def action_text(self, action_ids: Sequence[int]) -> str:
        """See `Renderer`."""
        return _decode(self._tokenizer, action_ids)

    def _encode(self, text: str) -> list[int]:
        return list(
            self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        )


class ChatRenderer:
    """The model's own chat template; observations come as user messages.

    What a later message adds is the difference between two renderings of a fixed conversation,
    with and without it. That is only right for a template that never rewrites what came before,
    which is checked once, here: ConfigError for one that does.
    """

    def __init__(self, tokenizer: Any, stop_texts: Sequence[str]) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self.stop_token_ids = _stop_ids(tokenizer, stop_texts)
        self._base = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        self._base_ids = self._render(self._base, open_turn=False)
        self._end_id = int(tokenizer.eos_token_id)
        self._after_end = self._tail_after_end_token()
        self._check_prefix(self.prompt_ids("a"), self._base_ids)
        self.observation_ids("c", self._end_id)

    def prompt_ids(self, text: str) -> list[int]:
        """See `Renderer`."""
        return self._render([{"role": "user", "content": text}], open_turn=True)

    def observation_ids(self, text: str, last_action_id: int) -> list[int]:
        """See `Renderer`. Begins with what the template puts behind the policy's message: its end
        token where the policy stopped at a stop text instead, then the template's separator."""
        longer = self._render([*self._base, {"role": "user", "content": text}], open_turn=True)
        self._check_prefix(self._base_ids, longer)
        closing = [] if last_action_id == self._end_id else [self._end_id]
        return closing + self._after_end + longer[len(self._base_ids) :]

    def action_text(self, action_ids: Sequence[int]) -> str:
        """See `Renderer`."""
        return _decode(self._tokenizer, action_ids)

    def _render(self, messages: list[dict[str, str]], *, open_turn: bool) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=open_turn, tokenize=True, return_dict=True
        )
        return list(rendered["input_ids"])

    def _tail_after_end_token(self) -> list[int]:
        """Ids between the assistant's end token, which is sampled, and the next message."""
        if self._end_id not in self._base_ids:
            raise ConfigError("model.path: its chat template closes no turn with the end token")
        last = len(self._base_ids) - 1 - self._base_ids[::-1].index(self._end_id)
        return self._base_ids[last + 1 :]

    @staticmethod
    def _check_prefix(shorter: Sequence[int], longer: Sequence[int]) -> None:
        if list(longer[: len(shorter)]) != list(shorter):
            raise ConfigError(
                "model.path: its chat template rewrites earlier turns when a message follows, so "
                "that sampled ids cannot be carried: use a model whose template only appends"
            )


def make_renderer(model_path: Path, family: EnvironmentFamily) -> Renderer:
    """The renderer that fits the model: its chat template where it has one, else plain text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer in {model_path} has no end token")
    kind = ChatRenderer if tokenizer.chat_template else PlainRenderer
    return kind(tokenizer, family.stop_texts)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:  # noqa: ANN401
    """Text as it was sampled: no special tokens, no tidying of spaces."""
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def _stop_ids(tokenizer: Any, stop_texts: Sequence[str]) -> tuple[int, ...]:  # noqa: ANN401
    """End token and the one token of each stop text."""
    ids = [tokenizer.eos_token_id]
    for text in stop_texts:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) != 1:
            raise ConfigError(f"stop text {text!r} is {len(encoded)} tokens; it must be one")
        ids.append(encoded[0])
    return tuple(dict.fromkeys(int(token) for token in ids))
