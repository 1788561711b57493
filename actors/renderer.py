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

    def observation_ids(self, text: str) -> list[int]:
        """Ids that follow an action before the next turn."""
        ...

    def action_text(self, action_ids: Sequence[int]) -> str:
        """What the policy wrote, without special tokens."""
        ...


class PlainRenderer:
    """Raw text: beginning token, prompt, actions, observations, end to end."""

    def __init__(self, tokenizer: Any, stop_texts: Sequence[str]) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self.stop_token_ids = _stop_ids(tokenizer, stop_texts)

    def prompt_ids(self, text: str) -> list[int]:
        """See `Renderer`."""
        begin = self._tokenizer.bos_token_id
        return ([] if begin is None else [begin]) + self.observation_ids(text)

    def observation_ids(self, text: str) -> list[int]:
        """See `Renderer`."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def action_text(self, action_ids: Sequence[int]) -> str:
        """See `Renderer`."""
        return str(self._tokenizer.decode(list(action_ids), skip_special_tokens=True))


class ChatRenderer:
    """The model's own chat template; observations come as user messages.

    What a later message adds is the difference between two renderings of a fixed conversation,
    with and without it. That is only right for a template that never rewrites what came before,
    which is checked once, here. Raises ConfigError for one that does.
    """

    def __init__(self, tokenizer: Any, stop_texts: Sequence[str]) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self.stop_token_ids = _stop_ids(tokenizer, stop_texts)
        self._base = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        self._base_ids = self._render(self._base, open_turn=False)
        self._after_end = self._tail_after_end_token()
        if not self._extends(self.prompt_ids("a"), self._base_ids):
            raise ConfigError(
                "the chat template rewrites earlier turns, so that sampled ids cannot be carried: "
                "use a model whose template only appends"
            )

    def prompt_ids(self, text: str) -> list[int]:
        """See `Renderer`."""
        return self._render([{"role": "user", "content": text}], open_turn=True)

    def observation_ids(self, text: str) -> list[int]:
        """See `Renderer`. Begins with what the template puts behind an end token."""
        longer = self._render([*self._base, {"role": "user", "content": text}], open_turn=True)
        if not self._extends(self._base_ids, longer):
            raise ConfigError("the chat template rewrites earlier turns when a message follows")
        return self._after_end + longer[len(self._base_ids) :]

    def action_text(self, action_ids: Sequence[int]) -> str:
        """See `Renderer`."""
        return str(self._tokenizer.decode(list(action_ids), skip_special_tokens=True))

    def _render(self, messages: list[dict[str, str]], *, open_turn: bool) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=open_turn, tokenize=True, return_dict=True
        )
        return list(rendered["input_ids"])

    def _tail_after_end_token(self) -> list[int]:
        """Ids between the assistant's end token, which is sampled, and the next message."""
        end = self._tokenizer.eos_token_id
        if end not in self._base_ids:
            raise ConfigError("the chat template does not close a turn with the end token")
        last = len(self._base_ids) - 1 - self._base_ids[::-1].index(end)
        return self._base_ids[last + 1 :]

    @staticmethod
    def _extends(prefix: Sequence[int], longer: Sequence[int]) -> bool:
        return list(longer[: len(prefix)]) == list(prefix)


def make_renderer(model_path: Path, family: EnvironmentFamily) -> Renderer:
    """The renderer that fits the model: its chat template where it has one, else plain text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer in {model_path} has no end token")
    kind = ChatRenderer if tokenizer.chat_template else PlainRenderer
    return kind(tokenizer, family.stop_texts)


def _stop_ids(tokenizer: Any, stop_texts: Sequence[str]) -> tuple[int, ...]:  # noqa: ANN401
    """End token and the one token of each stop text."""
    ids = [tokenizer.eos_token_id]
    for text in stop_texts:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) != 1:
            raise ConfigError(f"stop text {text!r} is {len(encoded)} tokens; it must be one")
        ids.append(encoded[0])
    return tuple(dict.fromkeys(int(token) for token in ids))
