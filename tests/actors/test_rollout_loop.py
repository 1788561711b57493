"""The rollout loop on the scripted engine: what ends it, and what must not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from actors.engine import GenerationRequest
from actors.environment import StepResult
from actors.rollout_group import rollout_group
from actors.rollout_loop import RolloutLoop
from actors.scripted_engine import EngineScript, ScriptedEngine
from actors.task_queue import Grant, PutOutcome
from actors.trajectory.codec import decode_group
from actors.trajectory.record import DropReason, TrajectoryGroup
from correction.errors import EngineError, TrajectoryError
from correction.group_filter import GroupFilter, GroupOutcome
from correction.versions import PolicyVersion
from tests.actors.rollout_doubles import (
    TASK,
    TOKENIZER,
    Plan,
    PlanFamily,
    encode,
    ends,
    returns,
    setting,
)

V0 = PolicyVersion(0, 0)


@dataclass
class Queue:
    """Grants `grants` groups one by one, and keeps what is put."""

    grants: int
    refuse: frozenset[int] = frozenset()
    asked: int = 0
    groups: list[TrajectoryGroup] = field(default_factory=list)

    async def request_tasks(self, actor: str, version: PolicyVersion, want: int) -> Sequence[Grant]:
        if self.asked == self.grants:
            return []
        self.asked += 1
        return [Grant(f"g{self.asked - 1}", self.asked - 1, 2)]

    async def put_group(self, group_id: str, payload: bytes) -> PutOutcome:
        if int(group_id[1:]) in self.refuse:
            raise TrajectoryError("non_finite", "as the queue's codec says")
        self.groups.append(decode_group(payload, run_id="run", learner_version=V0))
        return PutOutcome.ACCEPTED


def writes(request: GenerationRequest) -> list[int]:
    return [*encode("ab"), TOKENIZER.eos_token_id]


async def play(
    queue: Queue,
    script: EngineScript,
    plans: list[Plan],
    group_filter: GroupFilter = GroupFilter.NONE,
) -> None:
    """Run the loop until the queue has nothing more to grant."""
    engine = ScriptedEngine(script, V0)
    whole = setting(engine, PlanFamily(plans))  # type: ignore[arg-type]

    async def roll(grant: Grant) -> TrajectoryGroup:
        return await rollout_group(
            TASK, whole, run_id="run", group_id=grant.group_id, group_size=grant.group_size
        )

    loop = RolloutLoop(
        actor="a",
        engine=engine,
        queue=queue,
        roll_group=roll,
        groups_in_flight=1,
        group_filter=group_filter,
        idle_poll_s=0.001,
        full_retry_s=0.001,
    )

    async def stop_when_done() -> None:
        while queue.asked < queue.grants:
            await asyncio.sleep(0.001)
        loop.stop()

    async with asyncio.timeout(10):
        await asyncio.gather(loop.run(), stop_when_done())


def test_a_dead_engine_ends_the_loop_with_the_first_cause_at_once() -> None:
    queue = Queue(grants=50)
    script = EngineScript(write=writes, dies_at_generate=frozenset({2}))
    with pytest.raises(EngineError, match="scripted death"):
        asyncio.run(play(queue, script, [Plan(step_with=ends(1.0)) for _ in range(100)]))
    assert queue.asked == 2
    assert len(queue.groups) == 1


def test_a_group_that_the_queue_refuses_as_invalid_harms_no_other() -> None:
    queue = Queue(grants=3, refuse=frozenset({0, 1}))
    plans = [Plan(step_with=ends(1.0)) for _ in range(6)]
    asyncio.run(play(queue, EngineScript(write=writes), plans))
    assert [group.group_id for group in queue.groups] == ["g2"]


def test_a_group_that_cannot_be_written_is_put_as_invalid() -> None:
    too_many = Plan(step_with=returns(StepResult("", done=True, tool_calls=2**40)))
    queue = Queue(grants=2)
    plans = [too_many, Plan(step_with=ends(1.0)), *(Plan(step_with=ends(1.0)) for _ in range(2))]
    asyncio.run(play(queue, EngineScript(write=writes), plans))
    first, second = queue.groups
    assert first.failures == {DropReason.INVALID: 2}
    assert first.failed_tokens == {DropReason.INVALID: 6}
    assert len(second.trajectories) == 2


def test_what_the_filter_drops_travels_as_its_account_and_is_replaced() -> None:
    queue = Queue(grants=3)
    rewards = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    plans = [Plan(step_with=ends(reward)) for reward in rewards]
    script = EngineScript(write=writes)
    asyncio.run(play(queue, script, plans, GroupFilter.MIXED_REWARDS))
    easy, mixed, hard = queue.groups
    assert mixed.filtered is None
    assert [member.reward for member in mixed.trajectories] == [1.0, 0.0]
    assert easy.trajectories == hard.trajectories == ()
    assert easy.filtered is not None
    assert hard.filtered is not None
    assert (easy.filtered.outcome, hard.filtered.outcome) == (
        GroupOutcome.ALL_BEST,
        GroupOutcome.ALL_WORST,
    )
    assert easy.filtered.costs.tokens == mixed.action_tokens
    assert easy.filtered.costs.reward_mean == 1.0
