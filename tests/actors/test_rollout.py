"""One episode and one group: every way to end, what is kept, what is dropped and why."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from actors.engine import Completion, Engine, GenerationRequest
from actors.environment import Environment, StepResult, Task
from actors.environments.calculator import CalculatorFamily, solve
from actors.renderer import PlainRenderer
from actors.rollout import (
    RolloutFailure,
    RolloutLimits,
    RolloutSetting,
    all_identical,
    rollout,
    rollout_group,
)
from actors.trajectory.record import (
    DropReason,
    EndReason,
    KvMode,
    SamplingParameters,
    Trajectory,
    TrajectoryGroup,
    VersionRun,
)
from correction.errors import EngineError, EnvironmentFailure
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
        )


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
) -> RolloutSetting:
    renderer = PlainRenderer(TOKENIZER, ("]",))
    return RolloutSetting(
        engine=cast(Engine, engine),
        family=cast(CalculatorFamily, family),
        renderer=renderer,
        sampling=SamplingParameters(1.0, 16, renderer.stop_token_ids),
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


# --- what is kept ----------------------------------------------------------------------------


def test_an_episode_carries_ids_masks_versions_and_costs() -> None:
    family = CalculatorFamily()
    engine = WritingEngine(solves)
    whole = setting(engine, family, max_turns=4)
    task = family.task("train", 0)
    expression = task.payload["expression"]
    trajectory = finished(asyncio.run(rollout(task, whole, group_id="g", member=1)))

    assert (trajectory.reward, trajectory.end_reason) == (1.0, EndReason.DONE)
    assert (trajectory.terminated, trajectory.truncated) == (True, False)
    assert trajectory.reward_parts == {"correct": 1.0, "well_formed": 1.0, "tool_calls": 2.0}
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.member) == ("g/1", "g", 1)
    assert [turn.tool_calls for turn in trajectory.turns] == [1, 1, 0]
    assert trajectory.generation_s == 0.75
    assert trajectory.environment_s > 0
    assert trajectory.duration_s > trajectory.environment_s
    assert trajectory.started_at_s > 0
    assert {turn.engine_incarnation for turn in trajectory.turns} == {"engine-7"}
    assert trajectory.sampling == whole.sampling

    flat = trajectory.flat()
    text = TOKENIZER.decode(flat.token_ids)
    assert text.startswith(f"<bos>{expression}[")
    assert text.endswith("<eos>")
    acted = TOKENIZER.decode(flat.token_ids[flat.action_mask])
    assert acted == "".join(TOKENIZER.decode(turn.action_ids) for turn in trajectory.turns)
    assert "{" not in acted
    assert int(flat.action_mask.sum()) == trajectory.action_tokens
    assert np.all((flat.behaviour_logprobs == -0.5) == flat.action_mask)
    assert np.all((flat.behaviour_steps == 3) == flat.action_mask)
    for number in range(1, 3):
        before = engine.contexts[f"g/1/{number - 1}"]
        action = trajectory.turns[number - 1].action_ids.tolist()
        observed = trajectory.turns[number].observation_ids.tolist()
        assert engine.contexts[f"g/1/{number}"] == before + action + observed


def test_sampled_ids_are_not_encoded_again() -> None:
    odd = encode("é")[:1]  # half a character: decoding and encoding gives other ids

    class HalfCharacter(WritingEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            self.contexts[request.request_id] = list(request.context_ids)
            ids = [*odd, encode("]")[0]]
            return Completion(
                np.asarray(ids, np.int32),
                np.full(2, -0.5, np.float32),
                (VersionRun(VERSION, 2),),
                "stop",
                0.0,
            )

    engine = HalfCharacter(says_ab)
    plan = Plan()
    whole = setting(engine, PlanFamily([plan]), max_turns=2)
    trajectory = finished(asyncio.run(rollout(TASK, whole, group_id="g", member=0)))
    assert encode(plan.seen[0]) != trajectory.turns[0].action_ids.tolist()
    assert engine.contexts["g/0/1"][3:5] == [*odd, encode("]")[0]]
    assert trajectory.turns[0].action_ids.tolist() == [*odd, encode("]")[0]]


def test_the_environment_reads_the_stop_text_and_not_the_end_token() -> None:
    plan = Plan()
    play(plan, max_turns=1)
    assert plan.seen == ["ab]"]

    async def says_done(context: str) -> str:
        return "done"

    plan = Plan()
    play(plan, says_done, max_turns=1)
    assert plan.seen == ["done"]


def test_concurrent_episodes_never_see_one_another() -> None:
    family = CalculatorFamily()
    engine = WritingEngine(solves)
    whole = setting(engine, family, max_turns=4)

    async def many() -> list[Trajectory | RolloutFailure]:
        tasks = [family.task("train", index) for index in range(20)]
        return await asyncio.gather(
            *(rollout(t, whole, group_id=f"g{n}", member=0) for n, t in enumerate(tasks))
        )

    for number, outcome in enumerate(asyncio.run(many())):
        assert finished(outcome).reward == 1.0
        text = TOKENIZER.decode(finished(outcome).flat().token_ids)
        assert text.startswith(f"<bos>{family.task('train', number).payload['expression']}[")


# --- ends that the policy caused ---------------------------------------------------------------


async def rambles(context: str) -> str:
    return "x" * 50


@pytest.mark.parametrize(
    ("reply", "end", "turns"),
    [(says_ab, EndReason.MAX_TURNS, 3), (rambles, EndReason.MAX_TOKENS, 1)],
)
def test_a_limit_truncates_with_the_reward_so_far(reply: Reply, end: EndReason, turns: int) -> None:
    trajectory = finished(play(Plan(), reply))
    assert (trajectory.end_reason, len(trajectory.turns)) == (end, turns)
    assert (trajectory.truncated, trajectory.terminated) == (True, False)
    assert (trajectory.reward, trajectory.reward_parts) == (0.25, {"part": 1.0})


def test_an_action_that_was_cut_is_not_executed() -> None:
    plan = Plan()
    play(plan, rambles)
    assert plan.seen == []


@pytest.mark.parametrize("context_tokens", range(4, 12))
def test_a_full_context_is_an_end_and_no_crash(context_tokens: int) -> None:
    engine = WritingEngine(says_ab, max_context_tokens=context_tokens)  # <bos>go, 3 tokens
    plan = Plan()
    outcome = asyncio.run(
        rollout(TASK, setting(engine, PlanFamily([plan])), group_id="g", member=0)
    )
    trajectory = finished(outcome)
    assert trajectory.end_reason is EndReason.CONTEXT_OVERFLOW
    assert trajectory.context_tokens <= context_tokens
    assert len(trajectory.turns) == (2 if context_tokens == 11 else 1)
    assert plan.closed == 1


def test_a_long_tool_text_is_an_overflow() -> None:
    async def floods(text: str) -> StepResult:
        return StepResult(text="7" * 100)

    engine = WritingEngine(says_ab, max_context_tokens=60)
    whole = setting(engine, PlanFamily([Plan(step_with=floods)]))
    trajectory = finished(asyncio.run(rollout(TASK, whole, group_id="g", member=0)))
    assert trajectory.end_reason is EndReason.CONTEXT_OVERFLOW
    assert trajectory.context_tokens == 6


def test_a_prompt_that_does_not_fit_is_not_the_policys_fault() -> None:
    engine = WritingEngine(says_ab, max_context_tokens=3)
    whole = setting(engine, PlanFamily([Plan()]))
    outcome = asyncio.run(rollout(TASK, whole, group_id="g", member=0))
    assert isinstance(outcome, RolloutFailure)
    assert (outcome.reason, outcome.sampled_tokens) == (DropReason.OVERFLOW, 0)


# --- failures: never a reward --------------------------------------------------------------------


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


# --- groups ------------------------------------------------------------------------------------


async def group_of(plans: list[Plan], reply: Reply = says_ab) -> TrajectoryGroup:
    whole = setting(WritingEngine(reply), PlanFamily(list(plans)), environment_deadline_s=0.2)
    return await rollout_group(TASK, whole, run_id="run", group_id="g", group_size=len(plans))


def test_a_group_accounts_survivors_and_failures() -> None:
    broken = [Plan(step_with=raises(OSError("x"))), Plan(step_with=cast(Reply, hangs))]
    plans = [Plan(), *broken, Plan(), Plan(reset_with=raises(OSError("x")))]
    group = asyncio.run(group_of(plans))
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
            await group_of(plans, one_breaks)
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


def test_parts_of_the_last_action_are_a_mapping_of_floats() -> None:
    parts: Mapping[str, float] = finished(play(Plan(final=(1, {"n": 2})))).reward_parts
    assert {type(value) for value in parts.values()} == {float}
