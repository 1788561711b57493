"""An engine that writes what it is told, and an environment that does as it is told."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from actors.engine import Completion, Engine, GenerationRequest
from actors.environment import Environment, StepResult, Task
from actors.environments.calculator import CalculatorFamily, solve
from actors.renderer import PlainRenderer
from actors.rollout import (
    RolloutFailure,
    RolloutLimits,
    RolloutSetting,
    rollout,
)
from actors.trajectory.head import padded_head
from actors.trajectory.record import (
    KvMode,
    SamplingParameters,
    Trajectory,
    VersionRun,
)
from correction.versions import PolicyVersion
from learner.starter_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(512)
VERSION = PolicyVersion(0, 3)
NEVER_S = 3600.0


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


Reply = Callable[[str], Awaitable[str]]


@dataclass
class WritingEngine:
    """Writes what `reply` answers to the text in the context; ends it as the policy would."""

    reply: Reply
    max_context_tokens: int = 200
    version: PolicyVersion = VERSION
    incarnation: str = "engine-7"
    kv_mode: KvMode = KvMode.RECOMPUTE
    logprob: float = -0.5
    lost_logprobs: int = 0
    head_logprob: float = -0.5
    loses_heads: bool = False
    contexts: dict[str, list[int]] = field(default_factory=dict)
    cancelled: int = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        assert request.request_id not in self.contexts
        self.contexts[request.request_id] = list(request.context_ids)
        try:
            text = await self.reply(str(TOKENIZER.decode(list(request.context_ids)[1:])))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ids = encode(text) + ([] if text.endswith("]") else [TOKENIZER.eos_token_id])
        room = self.max_context_tokens - len(request.context_ids)
        most = min(request.sampling.max_turn_tokens, room)
        finish, ids = ("length", ids[:most]) if len(ids) > most else ("stop", ids)
        return Completion(
            action_ids=np.asarray(ids, np.int32),
            behaviour_logprobs=np.full(len(ids) - self.lost_logprobs, self.logprob, np.float32),
            version_runs=(VersionRun(self.version, len(ids)),),
            finish=finish,
            generation_s=0.25,
            **({} if self.loses_heads else self.heads(ids, request.sampling.head_tokens)),
        )

    def heads(self, ids: list[int], head_tokens: int) -> dict[str, Any]:
        if head_tokens == 0:
            return {}
        logprobs = np.full((len(ids), 1), self.head_logprob, np.float32)
        made = padded_head(np.array([ids], np.int32).T, logprobs, head_tokens)
        return {"head_ids": made[0], "head_logprobs": made[1]}


@dataclass
class Plan:
    """An environment that does as it is told, and remembers what was done to it."""

    reset_with: Callable[[], Awaitable[object]] | None = None
    step_with: Callable[[str], Awaitable[object]] | None = None
    final: object = (0.25, {"part": 1.0})
    close_with: Callable[[], Awaitable[None]] | None = None
    seen: list[str] = field(default_factory=list)
    closed: int = 0

    async def reset(self) -> object:
        return await self.reset_with() if self.reset_with else "go"

    async def step(self, action_text: str) -> object:
        self.seen.append(action_text)
        if self.step_with:
            return await self.step_with(action_text)
        return StepResult(text="more")

    def final_reward(self) -> object:
        if isinstance(self.final, Exception):
            raise self.final
        return self.final

    async def close(self) -> None:
        self.closed += 1
        if self.close_with:
            await self.close_with()


@dataclass
class PlanFamily:
    """Hands out the plans in order."""

    plans: list[Plan]
    stop_texts: tuple[str, ...] = ("]",)

    def task(self, split: str, index: int) -> Task:
        return Task("plan", split, index, f"plan:{index}")

    def environment(self, task: Task) -> Environment:
        return cast(Environment, self.plans.pop(0))


TASK = Task("plan", "train", 0, "plan:0")


async def says_ab(context: str) -> str:
    return "ab]"


def setting(
    engine: WritingEngine,
    family: object,
    *,
    max_turns: int = 3,
    episode_deadline_s: float = NEVER_S,
    environment_deadline_s: float = NEVER_S,
    head_tokens: int = 0,
) -> RolloutSetting:
    renderer = PlainRenderer(TOKENIZER, ("]",))
    return RolloutSetting(
        engine=cast(Engine, engine),
        family=cast(CalculatorFamily, family),
        renderer=renderer,
        sampling=SamplingParameters(1.0, 16, renderer.stop_token_ids, head_tokens),
        limits=RolloutLimits(max_turns, episode_deadline_s, environment_deadline_s, 100),
    )


def play(
    plan: Plan,
    reply: Reply = says_ab,
    *,
    max_turns: int = 3,
    episode_deadline_s: float = NEVER_S,
    environment_deadline_s: float = NEVER_S,
) -> Trajectory | RolloutFailure:
    """One episode; its environment must have been closed exactly once."""
    whole = setting(
        WritingEngine(reply),
        PlanFamily([plan]),
        max_turns=max_turns,
        episode_deadline_s=episode_deadline_s,
        environment_deadline_s=environment_deadline_s,
    )
    outcome = asyncio.run(rollout(TASK, whole, group_id="g", member=2))
    assert plan.closed == 1
    return outcome


def finished(outcome: Trajectory | RolloutFailure) -> Trajectory:
    assert isinstance(outcome, Trajectory), outcome
    return outcome


async def solves(context: str) -> str:
    """A perfect policy for 3 numbers, reading nothing but the context."""
    await asyncio.sleep(0)
    calls = context.count("{")
    expression = context.split("[")[0]
    solution = solve(expression)
    return solution.calls[calls] if calls < 2 else f"={solution.answer}"


async def hangs(*_: object) -> None:
    await asyncio.sleep(NEVER_S)


async def hangs_and_ignores_cancellation(*_: object) -> None:
    for _attempt in range(2):
        try:
            await asyncio.sleep(NEVER_S)
        except asyncio.CancelledError:
            continue


def raises(error: BaseException) -> Callable[..., Awaitable[object]]:
    async def failing(*_: object) -> object:
        raise error

    return failing


def returns(value: object) -> Callable[..., Awaitable[object]]:
    async def giving(*_: object) -> object:
        return value

    return giving


def ends(reward: object, parts: object = None) -> Callable[..., Awaitable[object]]:
    made = StepResult(text="", done=True)
    object.__setattr__(made, "reward", reward)
    object.__setattr__(made, "reward_parts", {} if parts is None else parts)
    return returns(made)
