"""One episode: what is kept of it, and the ends that the policy caused."""

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from actors.engine import Completion, GenerationRequest
from actors.environment import StepResult
from actors.environments.calculator import CalculatorFamily
from actors.rollout import (
    RolloutFailure,
    rollout,
)
from actors.trajectory.record import (
    DropReason,
    EndReason,
    Trajectory,
    VersionRun,
)
from tests.actors.rollout_doubles import (
    TASK,
    TOKENIZER,
    VERSION,
    Plan,
    PlanFamily,
    Reply,
    WritingEngine,
    encode,
    finished,
    play,
    says_ab,
    setting,
    solves,
)

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


def test_heads_of_all_turns_are_carried_and_change_nothing_else() -> None:
    family = CalculatorFamily()
    task = family.task("train", 0)
    played = []
    for head_tokens in (0, 4):
        whole = setting(WritingEngine(solves), family, max_turns=4, head_tokens=head_tokens)
        played.append(finished(asyncio.run(rollout(task, whole, group_id="g", member=1))))
    bare, headed = (trajectory.flat() for trajectory in played)
    assert len(played[1].turns) == 3
    assert headed.head_ids is not None
    assert headed.head_ids.shape == (len(headed.token_ids), 4)
    np.testing.assert_array_equal(
        headed.head_ids[:, 0], np.where(headed.action_mask, headed.token_ids, -1)
    )
    for name in ("token_ids", "action_mask", "behaviour_logprobs", "behaviour_steps", "turn_ids"):
        np.testing.assert_array_equal(getattr(headed, name), getattr(bare, name))
    assert bare.head_ids is None


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


def test_parts_of_the_last_action_are_a_mapping_of_floats() -> None:
    parts: Mapping[str, float] = finished(play(Plan(final=(1, {"n": 2})))).reward_parts
    assert {type(value) for value in parts.values()} == {float}
