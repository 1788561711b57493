"""Arithmetic with a calculator tool: three numbers, two calls, one answer.

    prompt   3+4*5
    policy   [4*5]      a call, ended by the stop text "]"
    tool     {20}
    policy   [3+20]
    tool     {23}
    policy   =23        the answer, ended by the policy's end token

Every expression mixes one kind of operator with the other, and doing the additive ones first
gives another number: the order of operators decides, the arithmetic is the tool's. Nothing that
the policy writes can fail the episode: what is no call gets the reply `{?}`.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from actors.environment import StepResult, Task, register
from correction.errors import ConfigError

NAME = "calculator"
ADDITIVE = "+-"
MULTIPLICATIVE = "*"
NO_SUCH_CALL = "{?}"
HELDOUT_ONE_IN = 8
"""One expression in this many belongs to the held-out split, by a hash of its text."""

_MOST_DIGITS = 12  # also the bound of the arithmetic: a longer result is no result
_CALL = re.compile(rf"\[(-?[0-9]{{1,{_MOST_DIGITS}}})([+*-])(-?[0-9]{{1,{_MOST_DIGITS}}})\]")
_ANSWER = re.compile(rf"=(-?[0-9]{{1,{_MOST_DIGITS}}})")
_EXPRESSION = re.compile(r"([0-9]+)|([+*-])")
_MOST_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class CalculatorOptions:
    """What expressions look like.

    smallest, largest: range of the numbers, both included, within 2..99 (a 1 or a 0 would make
    the order of operators matter less). numbers: how many there are, 3..6; one tool turn fewer.
    operators: some of "+-*", with "*" and at least one additive one.
    """

    smallest: int = 2
    largest: int = 9
    numbers: int = 3
    operators: str = "+-*"

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> CalculatorOptions:
        """From a configuration. Raises ConfigError naming the key and what it may be."""
        known = {field.name: field.type for field in fields(cls)}
        for key, value in options.items():
            wanted = {"int": int, "str": str}.get(str(known.get(key)))
            if wanted is None:
                raise ConfigError(f"environment.options.{key} is unknown; known: {sorted(known)}")
            if type(value) is not wanted:
                raise ConfigError(
                    f"environment.options.{key} must be {wanted.__name__}, got {value!r}"
                )
        parsed = cls(**options)  # type: ignore[arg-type]  # every type was checked just above
        parsed._check()
        return parsed

    def _check(self) -> None:
        if not 2 <= self.smallest <= self.largest - 3 or self.largest > 99:
            raise ConfigError(
                f"environment.options.smallest = {self.smallest}, largest = {self.largest}: "
                "need 2 <= smallest, smallest + 3 <= largest <= 99"
            )
        if not 3 <= self.numbers <= 6:
            raise ConfigError(f"environment.options.numbers = {self.numbers}: need 3 to 6")
        kinds = set(self.operators)
        if not (kinds <= set("+-*") and "*" in kinds and kinds & set(ADDITIVE)):
            raise ConfigError(
                f"environment.options.operators = {self.operators!r}: "
                "need '*' and at least one of '+' and '-', nothing else"
            )


@dataclass(frozen=True, slots=True)
class Solution:
    """Calls in the order they are made (`"[4*5]"`, ...) and the number that they lead to."""

    calls: tuple[str, ...]
    answer: int


def solve(expression: str, *, additive_first: bool = False) -> Solution:
    """Work an expression out call by call.

    additive_first: take the operators in the wrong order, as a weak policy does.
    """
    parts = list(_EXPRESSION.finditer(expression))
    numbers = [int(part[1]) for part in parts if part[1]]
    operators = [part[2] for part in parts if part[2]]
    calls = []
    for kind in (ADDITIVE, MULTIPLICATIVE) if additive_first else (MULTIPLICATIVE, ADDITIVE):
        while (at := _first(operators, kind)) is not None:
            operator = operators.pop(at)
            left, right = numbers[at], numbers.pop(at + 1)
            calls.append(f"[{left}{operator}{right}]")
            numbers[at] = _apply(left, operator, right)
    return Solution(tuple(calls), numbers[0])


def call_tool(text: str) -> str | None:
    """The calculator's reply to a call, or None where the text is not a call that it knows."""
    call = _CALL.fullmatch(text)
    if call is None:
        return None
    result = _apply(int(call[1]), call[2], int(call[3]))
    return f"{{{result}}}" if abs(result) < 10**_MOST_DIGITS else None


def _first(operators: Sequence[str], kind: str) -> int | None:
    return next((at for at, operator in enumerate(operators) if operator in kind), None)


def _apply(left: int, operator: str, right: int) -> int:
    if operator == "*":
        return left * right
    return left + right if operator == "+" else left - right


class CalculatorEpisode:
    """One expression. Reward 1 for the right final answer, else 0.

    Parts: `correct`; `well_formed`, 1 while every action was a call or an answer; `tool_calls`.
    """

    def __init__(self, expression: str, answer: int) -> None:
        self._expression = expression
        self._answer = answer
        self._correct = False
        self._well_formed = True
        self._tool_calls = 0

    async def reset(self) -> str:
        """The bare expression."""
        return self._expression

    async def step(self, action_text: str) -> StepResult:
        """Answer a call, which ends in "]"; anything else is taken as the final answer."""
        if action_text.endswith("]"):
            return self._call(action_text)
        answer = _ANSWER.fullmatch(action_text)
        self._well_formed &= answer is not None
        self._correct = answer is not None and int(answer[1]) == self._answer
        reward, parts = self.final_reward()
        return StepResult(text="", done=True, reward=reward, reward_parts=parts)

    def _call(self, text: str) -> StepResult:
        reply = call_tool(text)
        if reply is None:
            self._well_formed = False
            return StepResult(text=NO_SUCH_CALL)
        self._tool_calls += 1
        return StepResult(text=reply, tool_calls=1)

    def final_reward(self) -> tuple[float, Mapping[str, float]]:
        """Reward and parts so far; without a right answer the reward is 0."""
        correct = float(self._correct)
        return correct, {
            "correct": correct,
            "well_formed": float(self._well_formed),
            "tool_calls": float(self._tool_calls),
        }

    async def close(self) -> None:
        """Nothing is held."""


class CalculatorFamily:
    """Makes expressions. The text of one decides its split, so that the splits never share one."""

    stop_texts = ("]",)

    def __init__(self, options: CalculatorOptions | None = None) -> None:
        self.options = options or CalculatorOptions()

    def task(self, split: str, index: int) -> Task:
        """The index-th expression of a split: drawn until one falls into it."""
        if split not in ("train", "heldout"):
            raise ConfigError(f"split = {split!r}: need 'train' or 'heldout'")
        draw = random.Random(f"{NAME}/{split}/{index}")
        for _ in range(_MOST_DRAWS):
            expression = self._draw(draw)
            answer = solve(expression).answer
            decides = solve(expression, additive_first=True).answer != answer
            if decides and _split_of(expression) == split:
                payload = {"expression": expression, "answer": answer}
                return Task(NAME, split, index, f"{NAME}:{expression}", payload)
        raise ConfigError(f"environment.options {self.options}: no expression for {split!r}")

    def _draw(self, draw: random.Random) -> str:
        options = self.options
        numbers = [draw.randint(options.smallest, options.largest) for _ in range(options.numbers)]
        operators = [draw.choice(options.operators) for _ in range(options.numbers - 1)]
        rest = zip(operators, numbers[1:], strict=True)
        return str(numbers[0]) + "".join(f"{operator}{number}" for operator, number in rest)

    def environment(self, task: Task) -> CalculatorEpisode:
        """A fresh episode of an expression."""
        return CalculatorEpisode(str(task.payload["expression"]), int(str(task.payload["answer"])))


def _split_of(expression: str) -> str:
    digest = hashlib.blake2b(expression.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest) % HELDOUT_ONE_IN == 0 else "train"


@register(NAME)
def calculator(options: Mapping[str, object]) -> CalculatorFamily:
    """Family "calculator"; options as in CalculatorOptions."""
    return CalculatorFamily(CalculatorOptions.parse(options))
