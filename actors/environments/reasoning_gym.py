"""Adapter for the PyPI package reasoning-gym: a hundred kinds of verifiable tasks, offline.

One turn: the question goes out, the policy replies, the library's own scorer marks the answer
found in the reply. Options: `task` names the dataset ("chain_sum", ...); `prompt` and `answer`
are described at ReasoningGymOptions; every other option is the dataset's own.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from actors.environment import StepResult, Task, register
from correction.errors import ConfigError

NAME = "reasoning_gym"
HELDOUT_ONE_IN = 8
"""One question in this many belongs to the held-out split, by a hash of its text."""

ANSWERS = ("tag", "number", "whole")
_QUESTION = "{question}"
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_BLOCK = 1024  # questions of one dataset object: some kinds prepare all of them at once
_DISTINCT = 2**22  # tasks of a split before it repeats
_MOST_DRAWS = 256
_FIRST_SEED = {"train": 0, "heldout": 2**31}  # far apart: no seed serves both splits


@dataclass(frozen=True, slots=True)
class ReasoningGymOptions:
    """What is asked and what counts as the answer.

    task: name of the dataset. prompt: text around "{question}", for instructions and examples.
    answer: "tag" (inside the last <answer>...</answer>, else the whole reply), "number" (the last
    number in the reply) or "whole". dataset: the dataset's own options.
    """

    task: str
    prompt: str = _QUESTION
    answer: str = "tag"
    dataset: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> ReasoningGymOptions:
        """From a configuration. Raises ConfigError naming the key and what it may be."""
        own = {key: options[key] for key in ("task", "prompt", "answer") if key in options}
        for key, value in own.items():
            if not isinstance(value, str):
                raise ConfigError(f"environment.options.{key} must be text, got {value!r}")
        for key in ("seed", "size"):
            if key in options:
                raise ConfigError(f"environment.options.{key}: lagwise sets it; remove the key")
        if "task" not in own:
            raise ConfigError('environment.options.task is missing: try task = "chain_sum"')
        rest = {key: value for key, value in options.items() if key not in own}
        parsed = cls(**own, dataset=rest)  # type: ignore[arg-type]  # all text, checked above
        if _QUESTION not in parsed.prompt:
            raise ConfigError(f'environment.options.prompt must hold "{_QUESTION}"')
        if parsed.answer not in ANSWERS:
            raise ConfigError(
                f"environment.options.answer = {parsed.answer!r}: need one of {ANSWERS}"
            )
        return parsed


def extract_answer(reply: str, how: str) -> str | None:
    """The part of a reply that is scored; None where there is none."""
    if how == "number":
        numbers = _NUMBER.findall(reply)
        return numbers[-1] if numbers else None
    if how == "tag":
        tagged = re.findall(r"<answer>(.*?)</answer>", reply, re.DOTALL)
        reply = tagged[-1] if tagged else reply
    return reply.strip() or None


class ReasoningGymEpisode:
    """One question. The reward is the library's score, 0..1, with its partial credit.

    Parts: `score`; `exact`, 1 for a full score; `answered`, 1 where an answer was found.
    """

    def __init__(self, dataset: Any, entry: Any, options: ReasoningGymOptions) -> None:  # noqa: ANN401
        self._dataset = dataset
        self._entry = entry
        self._options = options

    async def reset(self) -> str:
        """The question inside the configured prompt."""
        return self._options.prompt.replace(_QUESTION, str(self._entry["question"]))

    async def step(self, action_text: str) -> StepResult:
        """Score the reply; the episode is over.

        The scorer runs in a thread, so that a slow one meets the rollout's deadline.
        """
        answer = extract_answer(action_text, self._options.answer)
        score = 0.0 if answer is None else await asyncio.to_thread(self._score, answer)
        parts = {
            "score": score,
            "exact": float(score == 1.0),
            "answered": float(answer is not None),
        }
        return StepResult(text="", done=True, reward=score, reward_parts=parts)

    def _score(self, answer: str) -> float:
        try:
            return float(self._dataset.score_answer(answer, self._entry))
        except Exception:  # some scorers parse the answer: what they choke on is the policy's text
            return 0.0

    def final_reward(self) -> tuple[float, Mapping[str, float]]:
        """A reply that was cut is no answer."""
        return 0.0, {"score": 0.0, "exact": 0.0, "answered": 0.0}

    async def close(self) -> None:
        """Nothing is held."""


class ReasoningGymFamily:
    """Questions of one dataset. The text of one decides its split: the splits never share one."""

    stop_texts: tuple[str, ...] = ()

    def __init__(self, options: ReasoningGymOptions) -> None:
        self.options = options
        self._library = _library()
        self._block = lru_cache(maxsize=32)(self._make_block)
        self._check()

    def task(self, split: str, index: int) -> Task:
        """The index-th question of a split; repeats after some four million."""
        if split not in _FIRST_SEED:
            raise ConfigError(f"split = {split!r}: need 'train' or 'heldout'")
        for attempt in range(_MOST_DRAWS):
            seed = _FIRST_SEED[split] + attempt * _DISTINCT + index % _DISTINCT
            question = str(self._entry(seed)["question"])
            digest = hashlib.blake2b(question.encode(), digest_size=8)
            heldout = int.from_bytes(digest.digest()) % HELDOUT_ONE_IN == 0
            if heldout == (split == "heldout"):
                task_id = f"{NAME}:{self.options.task}:{digest.hexdigest()}"
                return Task(NAME, split, index, task_id, {"seed": seed})
        raise ConfigError(
            f"environment.options.task = {self.options.task!r}: "
            f"too few different questions to find one for {split!r}"
        )

    def environment(self, task: Task) -> ReasoningGymEpisode:
        """A fresh episode of a question."""
        seed = int(str(task.payload["seed"]))
        return ReasoningGymEpisode(self._block(seed // _BLOCK), self._entry(seed), self.options)

    def _entry(self, seed: int) -> Any:  # noqa: ANN401  (the library's entries are untyped)
        return self._block(seed // _BLOCK)[seed % _BLOCK]

    def _make_block(self, block: int) -> Any:  # noqa: ANN401
        """The library seeds its i-th question with seed + i: blocks continue one another."""
        return self._library.create_dataset(
            self.options.task, seed=block * _BLOCK, size=_BLOCK, **self.options.dataset
        )

    def _check(self) -> None:
        """Make the first question, so that wrong options are refused before anything starts."""
        known = self._library.factory.DATASETS
        if self.options.task not in known:
            near = difflib.get_close_matches(self.options.task, known, n=3)
            raise ConfigError(
                f"environment.options.task = {self.options.task!r} is no reasoning-gym dataset"
                + (f"; did you mean {near}?" if near else "")
            )
        try:
            self._entry(0)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"environment.options: reasoning-gym refuses {self.options.task!r} "
                f"with {dict(self.options.dataset)}: {error}"
            ) from error


def _library() -> Any:  # noqa: ANN401
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"environment.name = {NAME!r} needs the package reasoning-gym: "
            "install lagwise with the extra 'tasks'"
        ) from error
    return reasoning_gym


@register(NAME)
def reasoning_gym_family(options: Mapping[str, object]) -> ReasoningGymFamily:
    """Family "reasoning_gym"; options as in ReasoningGymOptions."""
    return ReasoningGymFamily(ReasoningGymOptions.parse(options))
