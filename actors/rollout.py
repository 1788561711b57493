"""One episode, and the siblings of a group: engine and environment in turns.

Contract
    consumes    a task
    produces    a trajectory, or a failure by name; for a group its survivors and failures
    waits for   the engine (which answers or fails) and the environment, each call under a deadline
    woken by    them
    invariants  only what the policy caused has a reward: environment failures, engine failures and
                deadlines are failures, never rewards; the environment is closed exactly once;
                sampled ids enter the next context as they are
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from actors.engine import Completion, Engine, GenerationRequest
from actors.environment import Environment, EnvironmentFamily, StepResult, Task
from actors.renderer import Renderer
from actors.trajectory.record import (
    DropReason,
    EndReason,
    SamplingParameters,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from correction.errors import EngineError, LagwiseError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """max_turns: model calls in an episode. episode_deadline_s: of the whole episode;
    environment_deadline_s: of one call into the environment. max_text_chars: longest text that
    an environment may hand over at once."""

    max_turns: int
    episode_deadline_s: float
    environment_deadline_s: float
    max_text_chars: int = 100_000


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """An episode that the policy did not end. sampled_tokens: what it had cost by then."""

    reason: DropReason
    detail: str
    sampled_tokens: int


class _Failed(LagwiseError):
    """Carries a drop reason up to `rollout`."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetting:
    """All that the episodes of one actor have in common."""

    engine: Engine
    family: EnvironmentFamily
    renderer: Renderer
    sampling: SamplingParameters
    limits: RolloutLimits


async def rollout(
    task: Task, setting: RolloutSetting, *, group_id: str, member: int
) -> Trajectory | RolloutFailure:
    """Play one episode. What engine and environment do wrong comes back as a failure by name."""
    episode = _Episode(setting, group_id, member)
    try:
        environment = setting.family.environment(task)
    except Exception as error:
        return RolloutFailure(DropReason.ENVIRONMENT_ERROR, _told(error), 0)
    try:
        async with asyncio.timeout(setting.limits.episode_deadline_s):
            return await episode.play(environment)
    except TimeoutError:
        return episode.failure(DropReason.ROLLOUT_DEADLINE, "the episode took too long")
    except EngineError as error:
        return episode.failure(DropReason.ENGINE_ERROR, _told(error))
    except _Failed as failed:
        return episode.failure(failed.reason, str(failed))
    finally:
        await _close(environment, setting.limits.environment_deadline_s)


async def rollout_group(
    task: Task, setting: RolloutSetting, *, run_id: str, group_id: str, group_size: int
) -> TrajectoryGroup:
    """Play all siblings of a task at once; survivors and failures, accounted."""
    outcomes = await asyncio.gather(
        *(rollout(task, setting, group_id=group_id, member=member) for member in range(group_size))
    )
    failures: Counter[DropReason] = Counter()
    failed_tokens: Counter[DropReason] = Counter()
    for outcome in outcomes:
        if isinstance(outcome, RolloutFailure):
            failures[outcome.reason] += 1
            failed_tokens[outcome.reason] += outcome.sampled_tokens
    return TrajectoryGroup(
        run_id=run_id,
        group_id=group_id,
        environment=task.environment,
        task_id=task.task_id,
        expected_size=group_size,
        trajectories=tuple(o for o in outcomes if isinstance(o, Trajectory)),
        failures=dict(failures),
        failed_tokens=dict(failed_tokens),
    )


@dataclass(slots=True)
class _Episode:
    """State of one episode while it is played."""

    setting: RolloutSetting
    group_id: str
    member: int
    turns: list[Turn] = field(default_factory=list)
    context_ids: list[int] = field(default_factory=list)
    observation_ids: list[int] = field(default_factory=list)
    environment_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)
    started_at_s: float = field(default_factory=time.time)

    async def play(self, environment: Environment) -> Trajectory:
        """Turn by turn until the environment or a limit ends it."""
        self._observe(self.setting.renderer.prompt_ids(await self._reset(environment)))
        while True:
            if self._overflows():
                return self._cut(EndReason.CONTEXT_OVERFLOW, environment)
            completion = await self._generate()
            if completion.finish == "length":
                self._keep(completion, tool_calls=0)
                return self._cut(self._why_cut(), environment)
            result = await self._step(environment, completion)
            self._keep(completion, result.tool_calls)
            if result.done:
                return self._finish(EndReason.DONE, result.reward, result.reward_parts)
            if len(self.turns) == self.setting.limits.max_turns:
                return self._cut(EndReason.MAX_TURNS, environment)
            self._observe(self.setting.renderer.observation_ids(result.text))

    def failure(self, reason: DropReason, detail: str) -> RolloutFailure:
        """What has been sampled so far, as a failure."""
        return RolloutFailure(reason, detail, sum(len(turn.action_ids) for turn in self.turns))

    # --- engine ----------------------------------------------------------------------------

    async def _generate(self) -> Completion:
        sampling = self.setting.sampling
        return await self.setting.engine.generate(
            GenerationRequest(
                request_id=f"{self.group_id}/{self.member}/{len(self.turns)}",
                context_ids=tuple(self.context_ids),
                sampling=sampling,
            )
        )

    def _observe(self, ids: list[int]) -> None:
        self.observation_ids = ids
        self.context_ids += ids

    def _overflows(self) -> bool:
        """Whether not even one more token fits, or nothing of the first context is left to see."""
        return len(self.context_ids) >= self.setting.engine.max_context_tokens

    def _why_cut(self) -> EndReason:
        if len(self.context_ids) >= self.setting.engine.max_context_tokens:
            return EndReason.CONTEXT_OVERFLOW
        return EndReason.MAX_TOKENS

    def _keep(self, completion: Completion, tool_calls: int) -> None:
        self.turns.append(
            Turn(
                observation_ids=np.asarray(self.observation_ids, np.int32),
                action_ids=completion.action_ids,
                behaviour_logprobs=completion.behaviour_logprobs,
                version_runs=completion.version_runs,
                finish=completion.finish,
                tool_calls=tool_calls,
                generation_s=completion.generation_s,
                environment_s=self.environment_s,
                engine_incarnation=self.setting.engine.incarnation,
            )
        )
        self.context_ids += completion.action_ids.tolist()
        self.environment_s = 0.0

    # --- environment -------------------------------------------------------------------------

    async def _reset(self, environment: Environment) -> str:
        return self._text(await self._call(environment.reset()))

    async def _step(self, environment: Environment, completion: Completion) -> StepResult:
        text = self.setting.renderer.action_text(completion.action_ids.tolist())
        result = await self._call(environment.step(text))
        if not isinstance(result, StepResult):
            raise _Failed(DropReason.ENVIRONMENT_ERROR, f"step returned {type(result).__name__}")
        self._text(result.text)
        return result

    async def _call(self, work: Awaitable[T]) -> T:
        """One call into the environment, timed, under its deadline."""
        began = time.monotonic()
        deadline = asyncio.timeout(self.setting.limits.environment_deadline_s)
        try:
            async with deadline:
                return await work
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                reason = DropReason.ENVIRONMENT_TIMEOUT
            else:
                reason = DropReason.ENVIRONMENT_ERROR
            raise _Failed(reason, _told(error)) from error
        finally:
            self.environment_s += time.monotonic() - began

    def _text(self, text: object) -> str:
        if not isinstance(text, str):
            raise _Failed(DropReason.ENVIRONMENT_ERROR, f"{type(text).__name__} instead of text")
        if len(text) > self.setting.limits.max_text_chars:
            raise _Failed(DropReason.ENVIRONMENT_ERROR, f"a text of {len(text)} characters")
        return text

    # --- the end -------------------------------------------------------------------------------

    def _cut(self, reason: EndReason, environment: Environment) -> Trajectory:
        """End an episode that hit a limit, with what the environment gives for it."""
        try:
            reward, parts = environment.final_reward()
        except Exception as error:
            raise _Failed(DropReason.ENVIRONMENT_ERROR, _told(error)) from error
        return self._finish(reason, reward, parts)

    def _finish(self, reason: EndReason, reward: float, parts: Mapping[str, float]) -> Trajectory:
        numbers = {"reward": reward, **parts}
        for name, value in numbers.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise _Failed(DropReason.ENVIRONMENT_ERROR, f"{name} is {value!r}")
        if not self.turns:
            raise _Failed(DropReason.ENVIRONMENT_ERROR, "the prompt does not fit the context")
        return Trajectory(
            trajectory_id=f"{self.group_id}/{self.member}",
            group_id=self.group_id,
            member=self.member,
            turns=tuple(self.turns),
            reward=float(reward),
            reward_parts={name: float(value) for name, value in parts.items()},
            end_reason=reason,
            sampling=self.setting.sampling,
            kv_mode=self.setting.engine.kv_mode,
            started_at_s=self.started_at_s,
            duration_s=time.monotonic() - self.began_s,
        )


async def _close(environment: Environment, deadline_s: float) -> None:
    """Release the environment; what fails here cannot undo the episode."""
    try:
        await asyncio.wait_for(environment.close(), deadline_s)
    except Exception:
        return


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
