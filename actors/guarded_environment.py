"""An environment behind a fence: nothing that it does wrong gets past, except by name.

Environments are other people's code. Each call runs under a deadline that also holds against one
that ignores its cancellation, and what comes back is checked before anyone uses it: text that is
text and bounded, numbers that are finite. A fault ends the episode in `EpisodeDropped`; it is
never a reward. (Code that blocks the event loop itself cannot be fenced from inside it.)
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from actors.environment import Environment, StepResult
from actors.trajectory.record import DropReason
from correction.errors import EnvironmentFailure, LagwiseError

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]

CANCEL_GRACE_S = 1.0
"""How long a cancelled call may take to clean up; then it is left to itself."""


class EpisodeDropped(LagwiseError):
    """An episode that must not be trained on. `reason` is what it is counted under."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class GuardedEnvironment:
    """One episode's environment. Every method but `close` raises EpisodeDropped for its faults.

    deadline_s: of each call. max_text_chars: longest text that may be handed over at once.
    spent_s: seconds in the environment since `take_spent_s` was last called.
    """

    def __init__(self, environment: Environment, deadline_s: float, max_text_chars: int) -> None:
        self._environment = environment
        self._deadline_s = deadline_s
        self._max_text_chars = max_text_chars
        self._spent_s = 0.0

    async def reset(self) -> str:
        """The prompt text."""
        return self._text(await self._call(self._environment.reset))

    async def step(self, action_text: str) -> StepResult:
        """The checked answer to one action."""
        result = await self._call(lambda: self._environment.step(action_text))
        if not isinstance(result, StepResult):
            raise _fault(f"step returned {type(result).__name__}")
        if not isinstance(result.tool_calls, int) or result.tool_calls < 0:
            raise _fault(f"tool_calls is {result.tool_calls!r}")
        text = self._text(result.text)
        if not result.done:
            return replace(result, text=text)
        reward, parts = _checked_reward(result.reward, result.reward_parts)
        return replace(result, text=text, reward=reward, reward_parts=parts)

    def final_reward(self) -> tuple[float, Mapping[str, float]]:
        """Reward and parts of an episode that was cut."""
        try:
            reward, parts = self._environment.final_reward()
        except Exception as error:
            raise _fault(told(error)) from error
        return _checked_reward(reward, parts)

    async def close(self) -> None:
        """Release the environment; what fails here cannot undo the episode."""
        try:
            await _within(self._environment.close, self._deadline_s)
        except Exception:
            return

    def take_spent_s(self) -> float:
        """Seconds spent in calls since this was last asked."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    async def _call(self, work: Work[T]) -> T:
        began = time.monotonic()
        try:
            return await _within(work, self._deadline_s)
        except _DeadlinePassed:
            late = f"a call took longer than {self._deadline_s:g} s"
            raise EpisodeDropped(DropReason.ENVIRONMENT_TIMEOUT, late) from None
        except Exception as error:
            raise _fault(told(error)) from error
        finally:
            self._spent_s += time.monotonic() - began

    def _text(self, text: object) -> str:
        if not isinstance(text, str):
            raise _fault(f"{type(text).__name__} instead of text")
        if len(text) > self._max_text_chars:
            raise _fault(f"a text of {len(text)} characters; {self._max_text_chars} are allowed")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # lone surrogates: no tokenizer takes them
            raise _fault(told(error)) from error
        return text


class _DeadlinePassed(LagwiseError):
    """Not a TimeoutError, which the environment may raise itself. Never leaves this module."""


async def _within(work: Work[T], deadline_s: float) -> T:
    """Await `work` for at most `deadline_s`. asyncio.timeout would wait for ever for code that
    swallows its cancellation, so the work gets a task of its own that can be left behind."""
    task = asyncio.ensure_future(_contained(work))
    try:
        await asyncio.wait({task}, timeout=deadline_s)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            await _cancel(task)
    raise _DeadlinePassed


async def _contained(work: Work[T]) -> T:
    """A call that exits or cancels itself has failed; it must not take the actor with it."""
    try:
        return await work()
    except (SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EnvironmentFailure(told(error)) from error


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, not shown
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)


def _checked_reward(reward: object, parts: object) -> tuple[float, Mapping[str, float]]:
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
        raise _fault(f"reward_parts is {parts!r:.80}")
    return _number("reward", reward), {name: _number(name, parts[name]) for name in parts}


def _number(name: str, value: Any) -> float:  # noqa: ANN401  (whatever the environment gave)
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _fault(f"{name} is {value!r:.80}") from error
    if not math.isfinite(number):
        raise _fault(f"{name} is {value!r:.80}")
    return number


def _fault(detail: str) -> EpisodeDropped:
    return EpisodeDropped(DropReason.ENVIRONMENT_ERROR, detail)


def told(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
