"""The rollout actor's class without Ray and without vLLM: what it does about bad environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from actors.engine import GenerationRequest
from actors.environment import Environment, Task, register
from actors.pool import RolloutActor
from actors.rollout import RolloutLimits
from actors.scripted_engine import EngineScript, ScriptedEngine
from actors.settings import ActorSettings
from actors.task_queue import Grant, PutOutcome
from actors.trajectory.codec import decode_group, encode_group
from actors.trajectory.record import DropReason
from actors.vllm_settings import VllmSettings
from correction.errors import EngineError
from correction.versions import PolicyVersion
from tests.actors.rollout_doubles import TOKENIZER, Plan, encode, ends, raises

V0 = PolicyVersion(0, 0)


class Moody:
    """Tasks whose index is divisible by 3 cannot be made; those by 2 fail when they are played."""

    stop_texts = ("]",)

    def task(self, split: str, index: int) -> Task:
        if index % 3 == 0:
            raise KeyError(f"no row {index}")
        return Task("moody", split, index, f"moody:{index}")

    def environment(self, task: Task) -> Environment:
        odd = task.index % 2 == 1
        plan = Plan(step_with=ends(0.5) if odd else raises(OSError("no network")))
        return plan  # type: ignore[return-value]


register("moody")(lambda options: Moody())


def writes(request: GenerationRequest) -> list[int]:
    return [*encode("ab"), TOKENIZER.eos_token_id]


def on_actor(
    tmp_path: Path,
    scenario: Callable[[RolloutActor], Coroutine[Any, Any, None]],
    script: EngineScript = EngineScript(write=writes),  # noqa: B008
    head_tokens: int = 0,
) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    settings = ActorSettings(
        name="actor-0.0",
        run_id="run",
        engine=VllmSettings(tmp_path, tmp_path, max_running_requests=2, head_tokens=head_tokens),
        environment="moody",
        environment_options={},
        temperature=1.0,
        max_turn_tokens=8,
        limits=RolloutLimits(2, 10.0, 10.0),
        groups_in_flight=1,
    )

    async def whole() -> None:
        actor = RolloutActor(settings)
        actor._engine = ScriptedEngine(script, V0)
        await scenario(actor)

    asyncio.run(whole())


def test_a_task_that_cannot_be_made_is_a_failed_group_not_a_dead_actor(tmp_path: Path) -> None:
    async def scenario(actor: RolloutActor) -> None:
        group = await actor._roll_group(Grant("g", 3, 4))
        assert group.failures == {DropReason.ENVIRONMENT_ERROR: 4}
        assert group.expected_size == 4

    on_actor(tmp_path, scenario)


def test_the_first_failure_of_each_kind_is_told_in_words(tmp_path: Path) -> None:
    async def scenario(actor: RolloutActor) -> None:
        assert (await actor.sample()).first_failures == {}
        await actor._roll_group(Grant("g", 2, 4))
        await actor._roll_group(Grant("h", 3, 4))
        told = (await actor.sample()).first_failures
        assert told == {"environment_error": "OSError: no network"}

    on_actor(tmp_path, scenario)


class FullTwice:
    """Grants one group of two, and has no room for it at first."""

    def __init__(self) -> None:
        self.grants = [Grant("g", 1, 2)]
        self.puts = 0

    async def request_tasks(self, actor: str, version: PolicyVersion, want: int) -> list[Grant]:
        granted, self.grants = self.grants, []
        return granted

    async def put_group(self, group_id: str, payload: bytes) -> PutOutcome:
        self.puts += 1
        return PutOutcome.FULL if self.puts < 3 else PutOutcome.ACCEPTED


def test_full_puts_and_groups_of_equal_members_are_counted(tmp_path: Path) -> None:
    async def scenario(actor: RolloutActor) -> None:
        before, queue = await actor.sample(), FullTwice()
        assert (before.full_puts, before.identical_groups) == (0, 0)
        await actor.begin(queue)
        async with asyncio.timeout(60):
            while queue.puts < 3:
                await asyncio.sleep(0.01)
        after = await actor.sample()
        assert (after.full_puts, after.identical_groups) == (2, 1)
        await actor.stop()

    on_actor(tmp_path, scenario)


def test_failed_held_out_episodes_have_no_reward(tmp_path: Path) -> None:
    async def scenario(actor: RolloutActor) -> None:
        rewards = await actor.evaluate(range(6), temperature=1.0)
        assert rewards == [None, 0.5, None, None, None, 0.5]

    on_actor(tmp_path, scenario)


@pytest.mark.parametrize("head_tokens", [0, 2])
def test_heads_are_asked_for_in_training_and_never_in_evaluation(
    tmp_path: Path, head_tokens: int
) -> None:
    asked = []

    def notes(request: GenerationRequest) -> list[int]:
        asked.append(request.sampling.head_tokens)
        return writes(request)

    async def scenario(actor: RolloutActor) -> None:
        group = await actor._roll_group(Grant("g", 1, 2))
        assert asked == [head_tokens] * 2
        assert [t.sampling.head_tokens for t in group.trajectories] == asked
        assert group.head_bytes == group.action_tokens * head_tokens * 8
        decoded = decode_group(encode_group(group), run_id="run", learner_version=V0)
        assert decoded.head_bytes == group.head_bytes
        asked.clear()
        assert await actor.evaluate([1], temperature=1.0) == [0.5]
        assert asked == [0]

    on_actor(tmp_path, scenario, EngineScript(write=notes), head_tokens)


def test_a_dead_engine_is_seen_by_whoever_asks(tmp_path: Path) -> None:
    async def scenario(actor: RolloutActor) -> None:
        with pytest.raises(EngineError, match="scripted death"):
            await actor.evaluate([1], temperature=1.0)
        with pytest.raises(EngineError, match="scripted death"):
            await actor.sample()

    on_actor(tmp_path, scenario, EngineScript(write=writes, dies_at_generate=frozenset({0})))
