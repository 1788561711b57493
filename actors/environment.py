"""The environment protocol: single-use, asynchronous, in text.

An environment never sees token ids: the rollout decodes what the policy sampled, hands the text
over, and encodes only the environment's own text. One environment object serves one episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from correction.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. Siblings of a group all work on the same task.

    environment: registered name. split: "train" or "heldout". index: place in the endless,
    deterministic sequence of that split. task_id: stable identity of the content.
    payload: what the environment needs to build the episode; JSON values only.
    """

    environment: str
    split: str
    index: int
    task_id: str
    payload: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the environment answers to one action.

    text: put into the context before the next turn; empty when done.
    done: the episode is over; then `reward` is its whole reward, finite, and `reward_parts`
        its named parts. Before that both are ignored.
    tool_calls: how many tool calls were executed for this action.
    """

    text: str
    done: bool = False
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    tool_calls: int = 0


class Environment(Protocol):
    """One episode. Raise EnvironmentFailure for what the policy did not cause."""

    async def reset(self) -> str:
        """The prompt text of the episode. Called once, first."""
        ...

    async def step(self, action_text: str) -> StepResult:
        """Apply what the policy wrote in one turn: without its end token, with a stop text."""
        ...

    def final_reward(self) -> tuple[float, Mapping[str, float]]:
        """Reward and parts of an episode that was cut (turn, token or context limit)."""
        ...

    async def close(self) -> None:
        """Release everything. Called exactly once, also after a failure."""
        ...


class EnvironmentFamily(Protocol):
    """Makes tasks and episodes of one kind; stateless and cheap to build on every actor."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts, each one token for the policy's tokenizer, that end a turn like its end token."""
        ...

    def task(self, split: str, index: int) -> Task:
        """The index-th task of a split, the same everywhere and always."""
        ...

    def environment(self, task: Task) -> Environment:
        """A fresh episode of a task."""
        ...


FamilyFactory = Callable[[Mapping[str, object]], EnvironmentFamily]
_REGISTRY: dict[str, FamilyFactory] = {}


def register(name: str) -> Callable[[FamilyFactory], FamilyFactory]:
    """Class or function decorator: make a family available under `environment.name`."""

    def add(factory: FamilyFactory) -> FamilyFactory:
        if name in _REGISTRY:
            raise ConfigError(f"environment {name!r} is registered twice")
        _REGISTRY[name] = factory
        return factory

    return add


def known_environments() -> tuple[str, ...]:
    """Registered names."""
    return tuple(sorted(_REGISTRY))


def make_family(name: str, options: Mapping[str, object]) -> EnvironmentFamily:
    """Build a family. Raises ConfigError for an unknown name, naming the known ones."""
    import actors.environments.catalogue  # noqa: F401  (registers what ships with lagwise)

    if name not in _REGISTRY:
        raise ConfigError(f"environment.name = {name!r} is unknown; known: {known_environments()}")
    return _REGISTRY[name](options)
