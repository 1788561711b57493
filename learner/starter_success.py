"""How well a local model does on an environment, measured with transformers alone.

A small independent check beside the real actors: whole episodes at temperature 1, batched.
Every row is fed exactly one token a step, either one that is forced on it (prompt, tool reply) or
the one it sampled, so all rows stand at the same position and nothing is ever padded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from actors.environment import Environment, EnvironmentFamily


@dataclass(frozen=True, slots=True)
class Success:
    """Means over `episodes` episodes: reward in 0..1, share that ended, tokens sampled."""

    episodes: int
    reward: float
    finished: float
    generated_tokens: float


@dataclass(slots=True)
class _Row:
    """One running episode: tokens still to be fed, and what was sampled in this turn."""

    environment: Environment
    forced: list[int]
    action: list[int] = field(default_factory=list)
    generated_tokens: int = 0
    reward: float | None = None

    def next_token(self, sampled: int, filler: int) -> int:
        """The token this row is fed next."""
        if self.reward is not None:
            return filler
        if self.forced:
            return self.forced.pop(0)
        self.action.append(sampled)
        self.generated_tokens += 1
        return sampled


class SuccessMeter:
    """Plays the first tasks of a split with a model and its tokenizer."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        family: EnvironmentFamily,
        *,
        most_tokens: int = 96,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._family = family
        self._most_tokens = most_tokens
        stops = [self._encode(text) for text in family.stop_texts]
        self._stop_ids = {tokenizer.eos_token_id, *(ids[0] for ids in stops)}

    def measure(self, *, split: str, episodes: int, seed: int) -> Success:
        """Play `episodes` tasks once each; an episode over `most_tokens` tokens earns nothing."""
        rows = asyncio.run(self._play(split, episodes, seed))
        return Success(
            episodes=episodes,
            reward=sum(row.reward or 0.0 for row in rows) / episodes,
            finished=sum(row.reward is not None for row in rows) / episodes,
            generated_tokens=sum(row.generated_tokens for row in rows) / episodes,
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def _play(self, split: str, episodes: int, seed: int) -> list[_Row]:
        rows = [await self._open(split, index) for index in range(episodes)]
        generator = torch.Generator().manual_seed(seed)
        fed = torch.full((episodes, 1), self._tokenizer.bos_token_id)
        cache = None
        for _ in range(self._most_tokens):
            with torch.inference_mode():
                out = self._model(fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            probabilities = out.logits[:, -1].softmax(-1)
            sampled = torch.multinomial(probabilities, 1, generator=generator)[:, 0].tolist()
            fed = torch.tensor([[token] for token in await self._advance(rows, sampled)])
            if all(row.reward is not None for row in rows):
                break
        for row in rows:
            await row.environment.close()
        return rows

    async def _open(self, split: str, index: int) -> _Row:
        environment = self._family.environment(self._family.task(split, index))
        return _Row(environment, self._encode(await environment.reset()))

    async def _advance(self, rows: Sequence[_Row], sampled: Sequence[int]) -> list[int]:
        fed = []
        for row, token in zip(rows, sampled, strict=True):
            fed.append(row.next_token(token, self._tokenizer.pad_token_id))
            if row.action and row.action[-1] in self._stop_ids:
                await self._end_turn(row)
        return fed

    async def _end_turn(self, row: _Row) -> None:
        text = self._tokenizer.decode(row.action, skip_special_tokens=True)
        row.action.clear()
        result = await row.environment.step(text)
        if result.done:
            row.reward = result.reward
        else:
            row.forced = self._encode(result.text)
