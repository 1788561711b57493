"""The real engine against transformers, token by token, before, during and after swaps."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from actors.engine import Completion, GenerationRequest
from actors.trajectory.record import KvMode, SamplingParameters
from actors.weights import SwapReport
from correction.errors import EngineError, InputError, SwapError, SwapRefused
from correction.versions import PolicyVersion
from tests.actors.engine_stand import STOP_ID, TEMPERATURE, VOCABULARY, Stand, make_model

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore")]  # vLLM's own imports warn


def request(
    name: str, context: Sequence[int], tokens: int, stop: bool = False
) -> GenerationRequest:
    stop_ids = (STOP_ID,) if stop else ()
    return GenerationRequest(name, context, SamplingParameters(TEMPERATURE, tokens, stop_ids))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("tied"), make_model(tied=True))
    yield stand
    stand.close()


def fresh(directory: Path) -> Stand:
    return Stand(directory, make_model(tied=True))


async def episode(stand: Stand, name: str, turns: int, tokens: int) -> float:
    """Several turns over one growing context; the worst difference of all of them."""
    context, worst = [5, 6, 7, 8 + len(name) % 7], 0.0
    for turn in range(turns):
        completion = await stand.engine.generate(
            request(f"{name}-{turn}", context, tokens, stop=True)
        )
        worst = max(worst, stand.learner.worst_difference(context, completion))
        context += [*completion.action_ids.tolist(), 9, 10 + turn]
    return worst


def test_every_sampled_token_agrees_over_several_turns(stand: Stand) -> None:
    async def work() -> list[float]:
        return await asyncio.gather(*(episode(stand, f"a{n}", 3, 24) for n in range(8)))

    assert max(stand.run(work())) < 1e-4


def test_stop_token_is_part_of_the_action_and_length_is_named(stand: Stand) -> None:
    async def work() -> list[Completion]:
        jobs = (request(f"s{n}", [5, 6, n], 200, stop=True) for n in range(4, 12))
        return await asyncio.gather(*(stand.engine.generate(job) for job in jobs))

    completions = stand.run(work())
    assert {completion.finish for completion in completions} >= {"stop"}
    for completion in completions:
        ids = completion.action_ids.tolist()
        assert (ids[-1] == STOP_ID) == (completion.finish == "stop")
        assert STOP_ID not in ids[:-1]
        assert len(ids) == 200 or completion.finish == "stop"


async def swap_while_running(stand: Stand) -> tuple[SwapReport, list[Completion], list[list[int]]]:
    contexts = [[5, 6, 7 + n] for n in range(12)]
    jobs = [
        asyncio.create_task(stand.engine.generate(request(f"r{n}", context, 300)))
        for n, context in enumerate(contexts)
    ]
    published = stand.learner.publish(stand.learner.train())
    await asyncio.sleep(0.3)
    assert not any(job.done() for job in jobs)
    report = await stand.engine.swap(published)
    assert not all(job.done() for job in jobs)
    return report, list(await asyncio.gather(*jobs)), contexts


def test_swap_in_flight_is_exact_on_both_sides(stand: Stand) -> None:
    before = stand.learner.newest
    report, completions, contexts = stand.run(swap_while_running(stand))
    after = stand.learner.newest
    print(f"phases {report.phases_s} stall {report.stall_s:.3f} mismatch {report.mismatch:.2g}")
    assert report.version == after == stand.engine.version
    assert set(report.phases_s) == {"check", "pause", "load", "resume", "verify"}
    assert report.mismatch < 1e-4
    assert any(len(completion.version_runs) == 2 for completion in completions)
    for context, completion in zip(contexts, completions, strict=True):
        assert [run.version for run in completion.version_runs] == [before, after]
        assert stand.learner.worst_difference(context, completion) < 1e-4


def test_agreement_holds_after_several_swaps_in_flight(stand: Stand) -> None:
    for _ in range(3):
        _, completions, contexts = stand.run(swap_while_running(stand))
        for context, completion in zip(contexts, completions, strict=True):
            assert stand.learner.worst_difference(context, completion) < 1e-4

    async def work() -> list[float]:
        return await asyncio.gather(*(episode(stand, f"b{n}", 3, 24) for n in range(8)))

    assert max(stand.run(work())) < 1e-4


def test_proof_does_not_wait_for_a_full_engine(stand: Stand) -> None:
    async def work() -> None:
        contexts = [[5, 6, 7 + n] for n in range(40)]
        jobs = [
            asyncio.create_task(stand.engine.generate(request(f"q{n}", context, 100)))
            for n, context in enumerate(contexts)
        ]
        published = stand.learner.publish(stand.learner.train())
        await asyncio.sleep(0.1)
        assert not any(job.done() for job in jobs)
        await stand.engine.swap(published)
        assert not any(job.done() for job in jobs)
        for context, completion in zip(contexts, await asyncio.gather(*jobs), strict=True):
            assert stand.learner.worst_difference(context, completion) < 1e-4

    stand.run(work())


def test_version_that_is_not_newer_is_skipped(stand: Stand) -> None:
    current = stand.engine.version
    report = stand.run(stand.engine.swap(stand.learner.publish(current)))
    assert report.version == current
    assert report.phases_s == {}
    old = stand.run(stand.engine.swap(stand.learner.publish(PolicyVersion(0, 0))))
    assert old.version == stand.engine.version == current


def test_second_swap_at_the_same_time_is_refused(stand: Stand) -> None:
    published = stand.learner.publish(stand.learner.train())

    async def work() -> None:
        first = asyncio.create_task(stand.engine.swap(published))
        await asyncio.sleep(0)
        with pytest.raises(SwapRefused, match="busy"):
            await stand.engine.swap(published)
        assert (await first).version == published.manifest.version

    stand.run(work())


def test_swap_of_a_cancelled_caller_still_ends_proven(stand: Stand) -> None:
    published = stand.learner.publish(stand.learner.train())

    async def work() -> None:
        caller = asyncio.create_task(stand.engine.swap(published))
        await asyncio.sleep(0)
        caller.cancel()
        await until(lambda: stand.engine.version == published.manifest.version)

    stand.run(work())
    assert stand.run(episode(stand, "c", 2, 16)) < 1e-4


@pytest.mark.parametrize("where", [100, 4096 + 50_000])
def test_damaged_segment_is_refused_and_the_engine_goes_on(stand: Stand, where: int) -> None:
    current = stand.engine.version
    published = stand.learner.publish(stand.learner.train())
    path = stand.settings.segment_directory / published.segment
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.raises(SwapRefused, match=r"corrupt|superseded"):
        stand.run(stand.engine.swap(published))
    assert stand.engine.version == current
    assert stand.run(episode(stand, "d", 2, 16)) < 1e-4
    again = stand.learner.publish(stand.learner.newest)
    assert stand.run(stand.engine.swap(again)).version == stand.learner.newest


def test_cancelled_request_is_aborted_inside_vllm(stand: Stand) -> None:
    async def work() -> None:
        job = asyncio.create_task(stand.engine.generate(request("x", [5, 6], 390)))
        await until(lambda: stand.engine._llm.get_num_unfinished_requests() == 1)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await until(lambda: stand.engine._llm.get_num_unfinished_requests() == 0)

    stand.run(work())
    assert stand.engine.stats()["running_requests"] == 0


@pytest.mark.parametrize("context", [[], [5] * 400, [VOCABULARY], [-1]])
def test_context_that_cannot_be_served_harms_nobody_else(stand: Stand, context: list[int]) -> None:
    with pytest.raises(InputError):
        stand.run(stand.engine.generate(request("y", context, 10)))
    assert stand.run(episode(stand, "e", 1, 8)) < 1e-4


def test_turn_is_cut_where_the_context_is_full(stand: Stand) -> None:
    completion = stand.run(stand.engine.generate(request("z", [5] * 395, 64)))
    assert len(completion.action_ids) == 5
    assert completion.finish == "length"


def test_failed_canary_releases_no_token_and_moves_nothing(tmp_path: Path) -> None:
    stand = fresh(tmp_path)

    async def work() -> None:
        running = [
            asyncio.create_task(stand.engine.generate(request(f"f{n}", [5, 6, n + 7], 300)))
            for n in range(8)
        ]
        await asyncio.sleep(0.3)
        bad = stand.learner.publish(stand.learner.train(), canary_error=0.05)
        with pytest.raises(SwapError, match="canary"):
            await stand.engine.swap(bad)
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(outcome, EngineError) for outcome in outcomes)
        assert all("canary" in str(outcome) for outcome in outcomes)

    try:
        stand.run(work())
        assert stand.engine.version == PolicyVersion(0, 0)
        with pytest.raises(EngineError, match="canary"):
            stand.run(stand.engine.generate(request("g", [5], 4)))
        good = stand.learner.publish(stand.learner.newest)
        with pytest.raises(EngineError, match="canary"):
            stand.run(stand.engine.swap(good))
    finally:
        stand.close()


def test_model_folder_that_is_not_the_learner_s_is_refused_at_the_start(tmp_path: Path) -> None:
    stand = fresh(tmp_path)
    try:
        stand.run(stand.engine.close())
        right = stand.learner.publish(PolicyVersion(0, 0)).manifest.canary
        wrong = replace(right, logprobs=tuple(value - 0.1 for value in right.logprobs))
        with pytest.raises(EngineError, match="canary"):
            stand.run(stand.create(wrong))
        stand.engine = stand.run(stand.create(right))
        assert stand.run(episode(stand, "n", 1, 8)) < 1e-4
    finally:
        stand.close()


def test_kept_kv_swaps_without_recomputing(tmp_path: Path) -> None:
    stand = Stand(tmp_path, make_model(tied=True), KvMode.KEEP)
    try:
        stand.run(episode(stand, "warm", 1, 8))
        report, completions, contexts = stand.run(swap_while_running(stand))
        assert report.mismatch < 1e-4
        worst = [
            stand.learner.worst_difference(context, completion)
            for context, completion in zip(contexts, completions, strict=True)
        ]
        assert min(worst) > 1e-2  # the hybrid policy of old KV and new weights is neither version's
    finally:
        stand.close()


def test_canary_that_is_not_a_number_is_no_proof(tmp_path: Path) -> None:
    stand = fresh(tmp_path)
    try:
        with pytest.raises(SwapError, match="nan"):
            stand.run(stand.engine.swap(stand.learner.publish(stand.learner.train(), math.nan)))
    finally:
        stand.close()


def test_update_that_lacks_a_parameter_kills_the_engine(tmp_path: Path) -> None:
    stand = fresh(tmp_path)
    try:
        published = stand.learner.publish(stand.learner.train())
        tensors = tuple(e for e in published.manifest.tensors if "layers.2.mlp" not in e.name)
        partial = replace(published, manifest=replace(published.manifest, tensors=tensors))
        with pytest.raises(SwapError, match="failed"):
            stand.run(stand.engine.swap(partial))
        assert stand.engine.version == PolicyVersion(0, 0)
        with pytest.raises(EngineError):
            stand.run(stand.engine.generate(request("h", [5], 4)))
    finally:
        stand.close()


def test_killed_engine_process_surfaces_at_once(tmp_path: Path) -> None:
    stand = fresh(tmp_path)

    async def work() -> None:
        running = asyncio.create_task(stand.engine.generate(request("k", [5, 6], 390)))
        await asyncio.sleep(0.2)
        (process_id,) = stand.engine.process_ids
        os.kill(process_id, signal.SIGKILL)
        with pytest.raises(EngineError):
            await running
        with pytest.raises(EngineError):
            await stand.engine.generate(request("l", [5, 6], 4))
        with pytest.raises(EngineError):
            await stand.engine.swap(stand.learner.publish(stand.learner.train()))

    try:
        stand.run(work())
    finally:
        stand.close()


@pytest.mark.parametrize(("tied", "llama"), [(False, False), (True, True)])
def test_other_heads_and_architectures_swap_exactly(
    tmp_path: Path, tied: bool, llama: bool
) -> None:
    stand = Stand(tmp_path, make_model(tied, llama))
    try:
        assert stand.run(episode(stand, "m", 2, 16)) < 1e-4
        report, completions, contexts = stand.run(swap_while_running(stand))
        assert report.mismatch < 1e-4
        for context, completion in zip(contexts, completions, strict=True):
            assert stand.learner.worst_difference(context, completion) < 1e-4
    finally:
        stand.close()
