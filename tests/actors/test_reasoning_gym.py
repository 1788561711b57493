"""The reasoning-gym adapter."""

import asyncio
import sys

import pytest

from actors.environment import EnvironmentFamily, StepResult, make_family
from actors.environments.reasoning_gym import HELDOUT_ONE_IN, extract_answer
from correction.errors import ConfigError

pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the library's own

SUMS = {
    "task": "chain_sum",
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
}


def family(**options: object) -> EnvironmentFamily:
    return make_family("reasoning_gym", {**SUMS, **options})


def ask(kind: EnvironmentFamily, index: int, reply: str) -> tuple[str, StepResult]:
    async def episode() -> tuple[str, StepResult]:
        environment = kind.environment(kind.task("train", index))
        question = await environment.reset()
        result = await environment.step(reply)
        await environment.close()
        return question, result

    return asyncio.run(episode())


def truth(question: str) -> int:
    left, operator, right = question.split(":")[1].split("=")[0].split()
    return int(left) + int(right) * (1 if operator == "+" else -1)


@pytest.mark.parametrize("index", range(8))
def test_the_right_answer_is_rewarded_and_another_is_not(index: int) -> None:
    kind = family(answer="number")
    question, result = ask(kind, index, "no answer")
    assert (result.done, result.reward, result.reward_parts["answered"]) == (True, 0.0, 0.0)
    answer = truth(question)
    _, right = ask(kind, index, f"The answer is {answer}.")
    assert (right.reward, right.reward_parts["exact"]) == (1.0, 1.0)
    assert ask(kind, index, f"{answer} or {answer + 100}")[1].reward < 1.0


def test_the_prompt_surrounds_the_question() -> None:
    bare, _ = ask(family(), 0, "")
    asked, _ = ask(family(prompt="Q: {question}\nA {number} only."), 0, "")
    assert asked == f"Q: {bare}\nA {{number}} only."


@pytest.mark.parametrize(
    ("how", "reply", "answer"),
    [
        ("number", "1 + 2 = 3.", "3"),
        ("number", "it is -4.5 degrees", "-4.5"),
        ("number", "none", None),
        ("tag", "<answer>1</answer> no, <answer> 2\n</answer>.", "2"),
        ("tag", " bare ", "bare"),
        ("tag", "<answer></answer>", None),
        ("whole", " <answer>1</answer> ", "<answer>1</answer>"),
        ("whole", "  ", None),
    ],
)
def test_what_counts_as_the_answer(how: str, reply: str, answer: str | None) -> None:
    assert extract_answer(reply, how) == answer


def test_tasks_are_the_same_everywhere_and_splits_share_no_question() -> None:
    first, second = family(), family()
    ids = {
        split: [first.task(split, index).task_id for index in range(150)]
        for split in ("train", "heldout")
    }
    assert ids["train"] == [second.task("train", index).task_id for index in range(150)]
    assert not set(ids["train"]) & set(ids["heldout"])
    assert len(set(ids["heldout"])) > 200 / HELDOUT_ONE_IN / 2
    task = first.task("heldout", 5)
    prompts = [asyncio.run(kind.environment(task).reset()) for kind in (first, second)]
    assert prompts[0] == prompts[1]


def test_an_index_of_any_size_has_a_question() -> None:
    kind = make_family("reasoning_gym", {"task": "word_ladder"})
    assert kind.task("train", 10**12).task_id


def test_an_answer_that_breaks_a_scorer_earns_nothing() -> None:
    kind = make_family("reasoning_gym", {"task": "countdown", "answer": "whole"})
    for reply in ("1/0", "((((", "import os", "\x00", "x" * 1000):
        assert ask(kind, 0, reply)[1].reward < 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"task": "chain_sun"}, "chain_sum"),
        ({"task": 3}, "task must be text"),
        ({"answer": "guess"}, "answer = 'guess'"),
        ({"prompt": "no question"}, "prompt must hold"),
        ({"seed": 1}, "options.seed"),
        ({"max_term": 3}, "max_term"),
        ({"min_terms": 9, "max_terms": 2}, "refuses 'chain_sum'"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        family(**options)


def test_a_missing_task_is_named() -> None:
    with pytest.raises(ConfigError, match=r"options\.task is missing"):
        make_family("reasoning_gym", {})


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="extra 'tasks'"):
        family()
