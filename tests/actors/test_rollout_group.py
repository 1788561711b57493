"""The siblings of one task: accounts, cancellation, sameness."""

import asyncio
from typing import cast

import pytest

from actors.engine import GenerationRequest
from actors.environments.calculator import CalculatorFamily, solve
from actors.renderer import PlainRenderer
from actors.rollout import RolloutLimits, RolloutSetting
from actors.rollout_group import all_identical, rollout_group
from actors.scripted_engine import EngineScript, ScriptedEngine
from actors.trajectory.record import DropReason, SamplingParameters, TrajectoryGroup
from correction.versions import PolicyVersion
from tests.actors.rollout_doubles import (
    NEVER_S,
    TASK,
    TOKENIZER,
    Plan,
    PlanFamily,
    Reply,
    WritingEngine,
    encode,
    hangs,
    raises,
    says_ab,
    setting,
)


async def group_of(
    plans: list[Plan], reply: Reply = says_ab, environment_deadline_s: float = NEVER_S
) -> TrajectoryGroup:
    whole = setting(
        WritingEngine(reply),
        PlanFamily(list(plans)),
        environment_deadline_s=environment_deadline_s,
    )
    return await rollout_group(TASK, whole, run_id="run", group_id="g", group_size=len(plans))


def test_a_group_accounts_survivors_and_failures() -> None:
    broken = [Plan(step_with=raises(OSError("x"))), Plan(step_with=cast(Reply, hangs))]
    plans = [Plan(), *broken, Plan(), Plan(reset_with=raises(OSError("x")))]
    group = asyncio.run(group_of(plans, environment_deadline_s=0.05))
    assert (group.run_id, group.group_id, group.environment) == ("run", "g", "plan")
    assert (group.task_id, group.expected_size) == ("plan:0", 5)
    assert [trajectory.member for trajectory in group.trajectories] == [0, 3]
    assert group.failures == {DropReason.ENVIRONMENT_ERROR: 2, DropReason.ENVIRONMENT_TIMEOUT: 1}
    assert group.failed_tokens == {
        DropReason.ENVIRONMENT_ERROR: 3,
        DropReason.ENVIRONMENT_TIMEOUT: 3,
    }
    assert [plan.closed for plan in plans] == [1] * 5


def test_cancelling_a_group_closes_everything() -> None:
    plans = [Plan(step_with=cast(Reply, hangs)) for _ in range(3)]

    async def cancelled() -> None:
        running = asyncio.create_task(group_of(plans))
        while not all(plan.seen for plan in plans):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [plan.closed for plan in plans] == [1, 1, 1]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(cancelled())


def test_an_error_of_our_own_stops_the_siblings_and_is_heard() -> None:
    plans = [Plan(), Plan(step_with=cast(Reply, hangs))]

    async def one_breaks(context: str) -> str:
        await asyncio.sleep(0)
        if context.endswith("more"):
            raise KeyError("a defect")
        return "ab]"

    async def broken() -> None:
        with pytest.raises(KeyError, match="a defect"):
            await asyncio.wait_for(group_of(plans, one_breaks), timeout=30)
        assert [plan.closed for plan in plans] == [1, 1]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(broken())


def test_identical_siblings_are_noticed() -> None:
    group = asyncio.run(group_of([Plan(), Plan()]))
    assert all_identical(group)
    lone = asyncio.run(group_of([Plan()]))
    assert not all_identical(lone)

    letters = iter("abcdefghij")

    async def varies(context: str) -> str:
        return f"{next(letters)}]"

    assert not all_identical(asyncio.run(group_of([Plan(), Plan()], varies)))


def test_a_scripted_engine_that_dies_fails_the_members_that_still_needed_it() -> None:
    family = CalculatorFamily()
    renderer = PlainRenderer(TOKENIZER, family.stop_texts)
    ended = TOKENIZER.eos_token_id

    def write(request: GenerationRequest) -> list[int]:
        text = str(TOKENIZER.decode(list(request.context_ids)[1:]))
        solution = solve(text.split("[")[0])
        calls = text.count("{")
        return (
            encode(solution.calls[calls]) if calls < 2 else [*encode(f"={solution.answer}"), ended]
        )

    async def play() -> TrajectoryGroup:
        script = EngineScript(write=write, dies_at_generate=frozenset({8}))
        whole = RolloutSetting(
            engine=ScriptedEngine(script, PolicyVersion(0, 3)),
            family=family,
            renderer=renderer,
            sampling=SamplingParameters(1.0, 16, renderer.stop_token_ids),
            limits=RolloutLimits(4, NEVER_S, NEVER_S),
        )
        task = family.task("train", 0)
        return await rollout_group(task, whole, run_id="run", group_id="g", group_size=3)

    group = asyncio.run(play())
    assert group.failures[DropReason.ENGINE_ERROR] + len(group.trajectories) == 3
    assert group.failures[DropReason.ENGINE_ERROR] >= 1
    assert group.failed_tokens[DropReason.ENGINE_ERROR] > 0
    assert all(trajectory.reward == 1.0 for trajectory in group.trajectories)
