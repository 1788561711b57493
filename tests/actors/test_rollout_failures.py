"""Failures of environments and engines: dropped by name, never a reward."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, cast

import numpy as np
import pytest

from actors.environment import StepResult
from actors.rollout import (
    RolloutFailure,
    rollout,
)
from actors.trajectory.record import (
    DropReason,
    EndReason,
)
from correction.errors import EngineError, EnvironmentFailure
from tests.actors.rollout_doubles import (
    TASK,
    Plan,
    PlanFamily,
    Reply,
    WritingEngine,
    ends,
    finished,
    hangs,
    hangs_and_ignores_cancellation,
    play,
    raises,
    returns,
    says_ab,
    setting,
)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(reset_with=raises(EnvironmentFailure("sandbox gone"))),
        Plan(reset_with=returns(None)),
        Plan(reset_with=returns("x" * 101)),
        Plan(reset_with=returns("\ud800")),
        Plan(step_with=raises(OSError("no network"))),
        Plan(step_with=raises(TimeoutError("the tool's own"))),
        Plan(step_with=raises(EngineError("not the engine's"))),
        Plan(step_with=raises(SystemExit(0))),
        Plan(step_with=raises(asyncio.CancelledError())),
        Plan(step_with=returns("text")),
        Plan(step_with=returns(StepResult(text=cast(str, b"bytes")))),
        Plan(step_with=returns(StepResult(text="x" * 101))),
        Plan(step_with=returns(StepResult(text="", tool_calls=-1))),
        Plan(step_with=returns(StepResult(text="", tool_calls=cast(int, "1")))),
        Plan(step_with=ends(math.nan)),
        Plan(step_with=ends(-math.inf)),
        Plan(step_with=ends("1.0")),
        Plan(step_with=ends(None)),
        Plan(step_with=ends(10**400)),
        Plan(step_with=ends(1.0, {"part": math.nan})),
        Plan(step_with=ends(1.0, [1.0])),
        Plan(step_with=ends(1.0, {3: 1.0})),
        Plan(final=RuntimeError("no score")),
        Plan(final=(math.nan, {})),
    ],
    ids=lambda plan: None,
)
def test_an_environment_at_fault_is_dropped_by_name(plan: Plan) -> None:
    outcome = play(plan, max_turns=2)
    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is DropReason.ENVIRONMENT_ERROR
    assert outcome.detail
    turns_sampled = len(plan.seen)
    assert outcome.sampled_tokens == 3 * turns_sampled


def test_rewards_of_other_number_types_are_numbers() -> None:
    plan = Plan(step_with=ends(np.float32(0.5), {"flag": True}))
    trajectory = finished(play(plan))
    assert (trajectory.reward, trajectory.reward_parts) == (0.5, {"flag": 1.0})
    assert type(trajectory.reward) is float


def test_an_environment_that_cannot_be_made_is_dropped() -> None:
    outcome = asyncio.run(
        rollout(TASK, setting(WritingEngine(says_ab), PlanFamily([])), group_id="g", member=0)
    )
    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is DropReason.ENVIRONMENT_ERROR


@pytest.mark.parametrize("hang", [hangs, hangs_and_ignores_cancellation])
@pytest.mark.parametrize("where", ["reset_with", "step_with"])
def test_an_environment_that_hangs_is_cut_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, hang: Reply, where: str
) -> None:
    monkeypatch.setattr("actors.guarded_environment.CANCEL_GRACE_S", 0.02)
    outcome = play(Plan(**cast(dict[str, Any], {where: hang})), environment_deadline_s=0.01)
    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is DropReason.ENVIRONMENT_TIMEOUT
    assert outcome.sampled_tokens == (3 if where == "step_with" else 0)


@pytest.mark.parametrize("close", [hangs, raises(OSError("cannot")), raises(SystemExit(1))])
def test_a_bad_close_does_not_undo_an_episode(close: Callable[[], Awaitable[None]]) -> None:
    plan = Plan(close_with=close)
    trajectory = finished(play(plan, environment_deadline_s=0.05))
    assert trajectory.end_reason is EndReason.MAX_TURNS


def test_the_whole_episode_has_a_deadline() -> None:
    async def slow(text: str) -> StepResult:
        await asyncio.sleep(0.004)
        return StepResult(text="m")

    outcome = play(Plan(step_with=slow), max_turns=10**6, episode_deadline_s=0.05)
    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is DropReason.ROLLOUT_DEADLINE
    assert outcome.sampled_tokens >= 3


def test_an_engine_that_hangs_meets_the_episodes_deadline() -> None:
    engine = WritingEngine(cast(Reply, hangs))
    whole = setting(engine, PlanFamily([Plan()]), episode_deadline_s=0.01)
    outcome = asyncio.run(rollout(TASK, whole, group_id="g", member=0))
    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is DropReason.ROLLOUT_DEADLINE
    assert engine.cancelled == 1


@pytest.mark.parametrize("error", [EngineError("dead"), TimeoutError("lost")])
def test_an_engine_that_fails_is_dropped_by_name(error: Exception) -> None:
    outcome = play(Plan(), cast(Reply, raises(error)))
    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is DropReason.ENGINE_ERROR
    assert type(error).__name__ in outcome.detail


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (WritingEngine(says_ab, logprob=math.nan), DropReason.NON_FINITE),
        (WritingEngine(says_ab, logprob=-math.inf), DropReason.NON_FINITE),
        (WritingEngine(says_ab, lost_logprobs=1), DropReason.INVALID),
    ],
)
def test_what_the_engine_garbled_is_dropped_and_never_padded(
    engine: WritingEngine, reason: DropReason
) -> None:
    plan = Plan()
    outcome = asyncio.run(
        rollout(TASK, setting(engine, PlanFamily([plan])), group_id="g", member=0)
    )
    assert isinstance(outcome, RolloutFailure)
    assert (outcome.reason, outcome.sampled_tokens, plan.closed) == (reason, 3, 1)


@pytest.mark.parametrize(
    ("engine", "reason", "sampled_tokens"),
    [
        (WritingEngine(says_ab, head_logprob=math.nan), DropReason.NON_FINITE, 3),
        (WritingEngine(says_ab, loses_heads=True), DropReason.INVALID, 9),
    ],
)
def test_heads_that_the_engine_garbled_or_lost_are_dropped(
    engine: WritingEngine, reason: DropReason, sampled_tokens: int
) -> None:
    whole = setting(engine, PlanFamily([Plan()]), head_tokens=2)
    outcome = asyncio.run(rollout(TASK, whole, group_id="g", member=0))
    assert isinstance(outcome, RolloutFailure)
    assert (outcome.reason, outcome.sampled_tokens) == (reason, sampled_tokens)
