"""The calculator: its tasks, its tool, its reward."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environment import StepResult, known_environments, make_family
from actors.environments.calculator import (
    HELDOUT_ONE_IN,
    CalculatorEpisode,
    CalculatorFamily,
    CalculatorOptions,
    call_tool,
    solve,
)
from correction.errors import ConfigError

FAMILY = CalculatorFamily()


def play(episode: CalculatorEpisode, *actions: str) -> StepResult:
    async def all_of_them() -> StepResult:
        await episode.reset()
        for action in actions:
            result = await episode.step(action)
        await episode.close()
        return result

    return asyncio.run(all_of_them())


def independent_value(expression: str) -> int:
    """By splitting, as one would on paper: products between signs. Deliberately not the product."""
    total = 0
    for term in expression.replace("-", "+-").split("+"):
        product = -1 if term.startswith("-") else 1
        for factor in term.lstrip("-").split("*"):
            product *= int(factor)
        total += product
    return total


def test_the_registry_knows_it() -> None:
    family = make_family("calculator", {"largest": 12})
    assert "calculator" in known_environments()
    assert family.stop_texts == ("]",)


def test_an_episode_as_in_the_docstring() -> None:
    assert solve("3+4*5").calls == ("[4*5]", "[3+20]")
    result = play(CalculatorEpisode("3+4*5", 23), "[4*5]", "[3+20]", "=23")
    assert result == StepResult(
        text="",
        done=True,
        reward=1.0,
        reward_parts={"correct": 1.0, "well_formed": 1.0, "tool_calls": 2.0},
    )


def test_the_wrong_order_is_not_rewarded() -> None:
    wrong = solve("3+4*5", additive_first=True)
    assert wrong.calls == ("[3+4]", "[7*5]")
    result = play(CalculatorEpisode("3+4*5", 23), *wrong.calls, f"={wrong.answer}")
    assert (result.reward, result.reward_parts["well_formed"]) == (0.0, 1.0)


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize(
    "options",
    [
        CalculatorOptions(),
        CalculatorOptions(smallest=10, largest=99, operators="+*"),
        CalculatorOptions(numbers=6),
    ],
)
@given(index=st.integers(0, 10**9))
def test_every_task_has_the_true_answer_and_order_decides_it(
    split: str, options: CalculatorOptions, index: int
) -> None:
    task = CalculatorFamily(options).task(split, index)
    expression = str(task.payload["expression"])
    solution = solve(expression)
    assert task.payload["answer"] == solution.answer == independent_value(expression)
    assert solve(expression, additive_first=True).answer != solution.answer
    assert len(solution.calls) == options.numbers - 1 >= 2
    reward = play(FAMILY.environment(task), *solution.calls, f"={solution.answer}").reward
    assert reward == 1.0


def test_tasks_are_the_same_everywhere_and_always() -> None:
    drawn = [FAMILY.task("train", index).payload["expression"] for index in range(3)]
    assert drawn == ["9*6-8", "3+2*5", "8-4*2"], "a change here changes every recorded task"
    assert FAMILY.task("train", 7) == CalculatorFamily().task("train", 7)


def test_train_and_heldout_share_no_expression() -> None:
    train, heldout = (
        {FAMILY.task(split, index).task_id for index in range(1200)}
        for split in ("train", "heldout")
    )
    assert not train & heldout
    assert len(heldout) > 200
    share = len(heldout) / (len(train) + len(heldout))
    assert 0.5 / HELDOUT_ONE_IN < share < 2 / HELDOUT_ONE_IN


@pytest.mark.parametrize(
    "call",
    [
        "[]",
        "]",
        "[4*]",
        "[4/5]",
        "[4*5*6]",
        "[ 4*5]",
        "[4**5]",
        "[search(3)]",
        "[__import__('os')]",
        "[4*\u0665]",
        "[1e9*5]",
        "[" + "9" * 400 + "*9]",
        "[999999999999*999999999999]",
        "\n[4*5]",
        "=23]",
    ],
)
def test_what_is_no_call_gets_an_answer_and_the_episode_goes_on(call: str) -> None:
    episode = CalculatorEpisode("3+4*5", 23)
    result = play(episode, call)
    assert (result.text, result.done, result.tool_calls) == ("{?}", False, 0)
    result = play(episode, "=23")
    assert (result.reward, result.reward_parts["well_formed"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "answer", ["", "23", "=", "=23 ", "=\u0662\u0663", "=2_3", "= 23", "=+23", "=23=23", "=24"]
)
def test_only_the_answer_itself_is_right(answer: str) -> None:
    result = play(CalculatorEpisode("3+4*5", 23), answer)
    assert (result.done, result.reward) == (True, 0.0)


def test_negative_results_can_be_called_and_answered() -> None:
    assert call_tool("[3-20]") == "{-17}"
    assert call_tool("[-17--3]") == "{-14}"
    assert play(CalculatorEpisode("3-4*5", -17), "=-17").reward == 1.0


@given(st.text(max_size=40))
def test_no_text_breaks_an_episode(text: str) -> None:
    result = play(CalculatorEpisode("3+4*5", 23), text)
    assert result.done is not text.endswith("]")
    assert result.reward in (0.0, 1.0)


def test_an_episode_that_is_cut_earns_nothing() -> None:
    episode = CalculatorEpisode("3+4*5", 23)
    play(episode, "[4*5]")
    assert episode.final_reward() == (0.0, {"correct": 0.0, "well_formed": 1.0, "tool_calls": 1.0})


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"bigest": 9}, "bigest"),
        ({"largest": "9"}, "largest"),
        ({"numbers": True}, "numbers"),
        ({"largest": 100}, "largest"),
        ({"smallest": 1}, "smallest"),
        ({"smallest": 8}, "smallest"),
        ({"numbers": 2}, "numbers"),
        ({"operators": "+-"}, "operators"),
        ({"operators": "*"}, "operators"),
        ({"operators": "+*/"}, "operators"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"environment.options.{key}|{key} ="):
        make_family("calculator", options)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="split = 'test'"):
        FAMILY.task("test", 0)
