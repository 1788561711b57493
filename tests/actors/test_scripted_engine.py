"""The scripted engine and the version gate keep the engine protocol, also when they fail."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from actors.engine import Completion, Engine, GenerationRequest
from actors.scripted_engine import EngineScript, ScriptedEngine
from actors.trajectory.head import check_head
from actors.trajectory.record import SamplingParameters, VersionRun
from actors.weights import Canary, SwapRequest, WeightManifest
from correction.errors import EngineError, InputError, SwapError, SwapRefused
from correction.versions import PolicyVersion

T = TypeVar("T")
V0, V1, V2 = (PolicyVersion(0, step) for step in range(3))
STOP_ID = 9


class VirtualClock:
    """Sleeps end in order of time as soon as everything else stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    async def sleep(self, duration_s: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + duration_s, next(self._order), woken))
        await woken

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if self._sleepers and not task.done():
                self.now_s, _, woken = heapq.heappop(self._sleepers)
                if not woken.done():
                    woken.set_result(None)
        return task.result()


def request(name: str = "r", tokens: int = 10, context: int = 3) -> GenerationRequest:
    return GenerationRequest(name, [1] * context, SamplingParameters(1.0, tokens, (STOP_ID,)))


def swap_to(version: PolicyVersion) -> SwapRequest:
    manifest = WeightManifest("run", version, (), (), (), Canary((1, 2), (-1.0,), 0.1))
    return SwapRequest(manifest, "segment-1-1")


def engine_of(clock: VirtualClock, **script: Any) -> ScriptedEngine:  # noqa: ANN401
    defaults: dict[str, Any] = {"write": lambda asked: [4] * 50, "step_s": 1.0}
    return ScriptedEngine(EngineScript(**{**defaults, **script}), V0, sleep=clock.sleep)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_it_is_an_engine() -> None:
    async def work() -> None:
        engine: Engine = engine_of(VirtualClock())
        assert engine.version == V0

    run(work())


def test_tokens_stop_and_length_and_logprobs_come_from_the_script() -> None:
    async def work() -> tuple[Completion, Completion]:
        clock = VirtualClock()
        engine = engine_of(
            clock,
            write=lambda asked: [4, 5, STOP_ID, 6, 7],
            logprob=lambda token_id, version: -token_id / 10,
        )
        stopped = await clock.run(engine.generate(request(tokens=5)))
        return stopped, await clock.run(engine.generate(request(tokens=2)))

    stopped, cut = run(work())
    assert stopped.action_ids.tolist() == [4, 5, STOP_ID]
    assert stopped.finish == "stop"
    np.testing.assert_allclose(stopped.behaviour_logprobs, [-0.4, -0.5, -0.9])
    assert stopped.version_runs == (VersionRun(V0, 3),)
    assert stopped.generation_s == 3.0
    assert (cut.action_ids.tolist(), cut.finish) == ([4, 5], "length")


def test_heads_hold_the_likeliest_of_the_script_by_the_version_of_the_token() -> None:
    """The sampled token is -1 at V0 and -3 at V1; id 6 is -2 at both; id 7 only at V1."""

    async def work() -> Completion:
        clock = VirtualClock()
        engine = engine_of(
            clock,
            logprob=lambda token_id, version: -1.0 - 2 * version.step,
            others=lambda token_id, version: {6: -2.0, 7: -0.5} if version == V1 else {6: -2.0},
        )
        asked = replace(request(tokens=4), sampling=SamplingParameters(1.0, 4, (), head_tokens=2))

        async def everything() -> Completion:
            job = asyncio.create_task(engine.generate(asked))
            await clock.sleep(2.5)
            await engine.swap(swap_to(V1))
            return await job

        return await clock.run(everything())

    completion = run(work())
    assert completion.version_runs == (VersionRun(V0, 2), VersionRun(V1, 2))
    assert completion.head_ids is not None
    assert completion.head_logprobs is not None
    assert completion.head_ids.tolist() == [[4, 6], [4, 6], [7, 6], [7, 6]]
    assert completion.head_logprobs.tolist() == [[-1, -2], [-1, -2], [-0.5, -2], [-0.5, -2]]
    assert completion.behaviour_logprobs.tolist() == [-1, -1, -3, -3]


def test_a_head_of_a_script_that_says_less_is_padded_and_none_is_made_unasked() -> None:
    async def work() -> tuple[Completion, Completion]:
        clock = VirtualClock()
        engine = engine_of(clock)
        headed = replace(request(tokens=2), sampling=SamplingParameters(1.0, 2, (), head_tokens=3))
        with_head = await clock.run(engine.generate(headed))
        return with_head, await clock.run(engine.generate(request("s", tokens=2)))

    padded, plain = run(work())
    assert padded.head_ids is not None
    assert padded.head_logprobs is not None
    assert padded.head_ids.tolist() == [[4, -1, -1]] * 2
    assert padded.head_logprobs.tolist() == [[-1.0, -np.inf, -np.inf]] * 2
    heads = (padded.head_ids, padded.head_logprobs)
    check_head(*heads, padded.action_ids, padded.behaviour_logprobs)
    assert (plain.head_ids, plain.head_logprobs) == (None, None)


def test_context_bounds_the_turn_and_a_full_one_is_refused() -> None:
    async def work() -> None:
        clock = VirtualClock()
        engine = engine_of(clock)
        completion = await clock.run(engine.generate(request(tokens=40, context=1020)))
        assert len(completion.action_ids) == 4
        for context in (0, 1024):
            with pytest.raises(InputError):
                await engine.generate(request(context=context))

    run(work())


def test_script_that_ends_without_a_stop_is_an_error_of_the_script() -> None:
    async def work() -> None:
        engine = engine_of(VirtualClock(), write=lambda asked: [4])
        with pytest.raises(InputError, match="script"):
            await engine.generate(request())

    run(work())


def test_swap_in_flight_labels_both_sides_and_stands_still_in_between() -> None:
    async def work() -> Completion:
        clock = VirtualClock()
        engine = engine_of(clock, load_s=100.0)
        running = asyncio.create_task(engine.generate(request(tokens=10)))

        async def later() -> None:
            await clock.sleep(4.5)
            report = await engine.swap(swap_to(V1))
            assert report.version == engine.version == V1
            assert report.stall_s == 100.0
            await running

        await clock.run(later())
        assert clock.now_s >= 104.5
        return running.result()

    assert run(work()).version_runs == (VersionRun(V0, 4), VersionRun(V1, 6))


def test_completion_with_unproven_tokens_waits_and_older_ones_do_not() -> None:
    async def work() -> None:
        clock = VirtualClock()
        engine = engine_of(clock, verify_s=50.0)
        ends: dict[str, float] = {}

        async def timed(name: str, tokens: int) -> Completion:
            completion = await engine.generate(request(name, tokens))
            ends[name] = clock.now_s
            return completion

        async def everything() -> None:
            old = asyncio.create_task(timed("old", 2))
            new = asyncio.create_task(timed("new", 6))
            await clock.sleep(3.5)
            swap = asyncio.create_task(engine.swap(swap_to(V1)))
            await clock.sleep(10.0)
            assert engine.stats()["held_requests"] == 1
            assert engine.version == V0
            await asyncio.gather(old, new, swap)

        await clock.run(everything())
        assert ends["old"] < 3.5
        assert ends["new"] >= 53.5

    run(work())


@pytest.mark.parametrize("kind", ["fails_load_at", "fails_canary_at"])
def test_failed_swap_kills_everything_with_its_cause_and_moves_nothing(kind: str) -> None:
    async def work() -> None:
        clock = VirtualClock()
        engine = engine_of(clock, verify_s=5.0, **{kind: frozenset({1})})

        async def everything() -> None:
            await engine.swap(swap_to(V1))
            running = asyncio.create_task(engine.generate(request(tokens=40)))
            await clock.sleep(3.5)
            with pytest.raises(SwapError, match="swap call 1"):
                await engine.swap(swap_to(V2))
            for late in (running, engine.generate(request()), engine.swap(swap_to(V2))):
                with pytest.raises(EngineError, match="swap call 1"):
                    await late

        await clock.run(everything())
        assert engine.version == V1

    run(work())


def test_refused_swap_harms_nothing() -> None:
    async def work() -> None:
        clock = VirtualClock()
        engine = engine_of(clock, refuses_at=frozenset({0}))
        with pytest.raises(SwapRefused, match="superseded"):
            await clock.run(engine.swap(swap_to(V1)))
        assert (await clock.run(engine.generate(request()))).version_runs == (VersionRun(V0, 10),)
        await clock.run(engine.swap(swap_to(V1)))
        assert engine.version == V1

    run(work())


def test_initial_version_can_be_confirmed_once_then_nothing_that_is_not_newer() -> None:
    async def work() -> None:
        clock = VirtualClock()
        engine = engine_of(clock)
        assert (await clock.run(engine.swap(swap_to(V0)))).phases_s != {}
        assert (await clock.run(engine.swap(swap_to(V0)))).phases_s == {}
        await clock.run(engine.swap(swap_to(V2)))
        report = await clock.run(engine.swap(swap_to(V1)))
        assert (report.version, report.phases_s) == (V2, {})
        assert engine.stats()["swaps"] == 2

    run(work())


def test_concurrent_swap_is_refused_as_busy() -> None:
    async def work() -> None:
        clock = VirtualClock()
        engine = engine_of(clock, load_s=5.0)

        async def everything() -> None:
            first = asyncio.create_task(engine.swap(swap_to(V1)))
            await clock.sleep(1.0)
            with pytest.raises(SwapRefused, match="busy"):
                await engine.swap(swap_to(V2))
            await first

        await clock.run(everything())

    run(work())


def test_swap_of_a_cancelled_caller_goes_on_to_its_end() -> None:
    async def work() -> None:
        clock = VirtualClock()
        engine = engine_of(clock, load_s=5.0)

        async def everything() -> None:
            caller = asyncio.create_task(engine.swap(swap_to(V1)))
            await clock.sleep(1.0)
            caller.cancel()
            completion = await engine.generate(request())
            assert completion.version_runs == (VersionRun(V1, 10),)
            assert engine.version == V1

        await clock.run(everything())

    run(work())


def test_swap_over_its_deadline_is_a_death() -> None:
    async def work() -> None:
        engine = ScriptedEngine(EngineScript(write=lambda asked: [], load_s=3600.0), V0)
        with pytest.raises(SwapError, match="TimeoutError after"):
            await engine.swap(replace(swap_to(V1), deadline_s=0.01))
        with pytest.raises(EngineError):
            await engine.generate(request())

    run(work())


def test_death_in_generate_reaches_every_request_with_the_first_cause() -> None:
    async def work() -> None:
        clock = VirtualClock()
        engine = engine_of(clock, dies_at_generate=frozenset({1}))

        async def everything() -> None:
            first = asyncio.create_task(engine.generate(request("a", 40)))
            await clock.sleep(2.0)
            outcomes = await asyncio.gather(
                first, engine.generate(request("b")), return_exceptions=True
            )
            assert all("generate call 1" in str(outcome) for outcome in outcomes)
            await engine.close()
            with pytest.raises(EngineError, match="generate call 1"):
                await engine.generate(request("c"))

        await clock.run(everything())

    run(work())


def test_cancelled_request_leaves_no_trace() -> None:
    async def work() -> None:
        clock = VirtualClock()
        engine = engine_of(clock)

        async def everything() -> None:
            job = asyncio.create_task(engine.generate(request(tokens=40)))
            await clock.sleep(2.0)
            assert engine.stats()["running_requests"] == 1
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            assert engine.stats()["running_requests"] == 0

        await clock.run(everything())
        assert len(asyncio.all_tasks()) == 1

    run(work())


def test_closed_engine_says_so() -> None:
    async def work() -> None:
        engine = engine_of(VirtualClock())
        waiting = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        for late in (waiting, engine.generate(request())):
            with pytest.raises(EngineError, match="closed"):
                await late

    run(work())
