"""One episode: engine and environment in turns.

Contract
    consumes    a task
    produces    a trajectory, or a failure by name
    waits for   the engine (which answers or fails) and the environment, each call under a
                deadline, and the whole episode under another
    woken by    them
    invariants  only what the policy caused has a reward: environment failures, engine failures and
                deadlines are failures, never rewards; the environment is closed exactly once;
                sampled ids enter the next context as they are
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from actors.engine import Completion, Engine, GenerationRequest
from actors.environment import EnvironmentFamily, Task
from actors.guarded_environment import EpisodeDropped, GuardedEnvironment, told
from actors.renderer import Renderer
from actors.trajectory.record import (
    DropReason,
    EndReason,
    SamplingParameters,
    Trajectory,
    Turn,
)
from correction.errors import EngineError, TrajectoryError


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
    limits = setting.limits
    try:
        environment = GuardedEnvironment(
            setting.family.environment(task), limits.environment_deadline_s, limits.max_text_chars
        )
    except Exception as error:
        return RolloutFailure(DropReason.ENVIRONMENT_ERROR, told(error), 0)
    episode = _Episode(setting, environment, group_id, member)
    deadline = asyncio.timeout(limits.episode_deadline_s)
    try:
        async with deadline:
            return await episode.play()
    except TimeoutError as error:
        if not deadline.expired():
            return episode.failure(DropReason.ENGINE_ERROR, told(error))
        return episode.failure(DropReason.ROLLOUT_DEADLINE, "the episode took too long")
    except EngineError as error:
        return episode.failure(DropReason.ENGINE_ERROR, told(error))
    except TrajectoryError as error:
        return episode.failure(DropReason.INVALID, told(error))
    except EpisodeDropped as dropped:
        return episode.failure(dropped.reason, str(dropped))
    finally:
        await environment.close()


@dataclass(slots=True)
class _Episode:
    """State of one episode while it is played."""

    setting: RolloutSetting
    environment: GuardedEnvironment
    group_id: str
    member: int
    turns: list[Turn] = field(default_factory=list)
    context_ids: list[int] = field(default_factory=list)
    observation_ids: list[int] = field(default_factory=list)
    sampled_tokens: int = 0
    began_s: float = field(default_factory=time.monotonic)
    started_at_s: float = field(default_factory=time.time)

    async def play(self) -> Trajectory:
        """Turn by turn until the environment or a limit ends it."""
        self._observe(self.setting.renderer.prompt_ids(await self.environment.reset()))
        while True:
            if self._is_full():
                return self._cut(EndReason.CONTEXT_OVERFLOW)
            completion = await self._generate()
            if completion.finish == "length":
                self._keep(completion, tool_calls=0)
                full = self._is_full()
                return self._cut(EndReason.CONTEXT_OVERFLOW if full else EndReason.MAX_TOKENS)
            text = self.setting.renderer.action_text(completion.action_ids.tolist())
            result = await self.environment.step(text)
            self._keep(completion, result.tool_calls)
            if result.done:
                return self._finish(EndReason.DONE, result.reward, result.reward_parts)
            if len(self.turns) == self.setting.limits.max_turns:
                return self._cut(EndReason.MAX_TURNS)
            last = int(completion.action_ids[-1])
            self._observe(self.setting.renderer.observation_ids(result.text, last))

    def failure(self, reason: DropReason, detail: str) -> RolloutFailure:
        """This episode as a failure, with what it had sampled so far."""
        return RolloutFailure(reason, detail, self.sampled_tokens)

    async def _generate(self) -> Completion:
        completion = await self.setting.engine.generate(
            GenerationRequest(
                request_id=f"{self.group_id}/{self.member}/{len(self.turns)}",
                context_ids=tuple(self.context_ids),
                sampling=self.setting.sampling,
            )
        )
        self.sampled_tokens += len(completion.action_ids)
        if not completion.is_sound:
            raise EpisodeDropped(DropReason.NON_FINITE, "a behaviour logprob is not finite")
        return completion

    def _observe(self, ids: list[int]) -> None:
        self.observation_ids = ids
        self.context_ids += ids

    def _is_full(self) -> bool:
        """Whether not even one more token fits the engine's context."""
        return len(self.context_ids) >= self.setting.engine.max_context_tokens

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
                environment_s=self.environment.take_spent_s(),
                engine_incarnation=self.setting.engine.incarnation,
                head_ids=completion.head_ids,
                head_logprobs=completion.head_logprobs,
            )
        )
        self.context_ids += completion.action_ids.tolist()

    def _cut(self, reason: EndReason) -> Trajectory:
        """End an episode that hit a limit, with what the environment gives for it."""
        if not self.turns:
            prompt = f"a prompt of {len(self.context_ids)} tokens does not fit the context"
            raise EpisodeDropped(DropReason.OVERFLOW, prompt)
        return self._finish(reason, *self.environment.final_reward())

    def _finish(self, reason: EndReason, reward: float, parts: Mapping[str, float]) -> Trajectory:
        return Trajectory(
            trajectory_id=f"{self.group_id}/{self.member}",
            group_id=self.group_id,
            member=self.member,
            turns=tuple(self.turns),
            reward=reward,
            reward_parts=parts,
            end_reason=reason,
            sampling=self.setting.sampling,
            kv_mode=self.setting.engine.kv_mode,
            started_at_s=self.started_at_s,
            duration_s=time.monotonic() - self.began_s,
        )
