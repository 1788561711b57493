"""Logprobs that are sent late are sent whole, once, in order, and never after an abort."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn


def test_logprobs_travel_with_the_final_output_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists

    from actors.vllm_scheduler import LateLogprobsScheduler

    monkeypatch.setattr(Scheduler, "__init__", lambda self: None)
    scheduler = LateLogprobsScheduler()

    def step(name: str, token: int, end: FinishReason | None = None) -> EngineCoreOutput:
        column = np.array([[token]])
        lists = LogprobsLists(column, -column / 10.0, np.array([token]))
        output = EngineCoreOutput(name, [token], new_logprobs=lists, finish_reason=end)
        group = EngineCoreOutputs(outputs=[output])
        monkeypatch.setattr(Scheduler, "update_from_output", lambda *ignored: {0: group})
        assert scheduler.update_from_output(None, None) == {0: group}
        return output

    assert step("a", 1).new_logprobs is None
    assert step("b", 5).new_logprobs is None
    assert step("a", 2).new_logprobs is None
    final = step("a", 3, FinishReason.LENGTH)
    assert final.new_token_ids == [3]
    assert final.new_logprobs is not None
    np.testing.assert_array_equal(final.new_logprobs.logprob_token_ids, [[1], [2], [3]])
    np.testing.assert_allclose(final.new_logprobs.logprobs, [[-0.1], [-0.2], [-0.3]])
    np.testing.assert_array_equal(final.new_logprobs.sampled_token_ranks, [1, 2, 3])

    ended = [SimpleNamespace(request_id="b")]
    monkeypatch.setattr(Scheduler, "finish_requests", lambda *ignored: ended)
    assert scheduler.finish_requests(["b"], None) == ended
    reused = step("b", 6, FinishReason.STOP)
    assert reused.new_logprobs is not None
    np.testing.assert_array_equal(reused.new_logprobs.logprob_token_ids, [[6]])


def test_heads_of_other_requests_in_the_batch_leave_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step is as wide as its longest head: a request beside one has other widths at each step."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists

    from actors.vllm_scheduler import LateLogprobsScheduler

    monkeypatch.setattr(Scheduler, "__init__", lambda self: None)
    scheduler = LateLogprobsScheduler()
    outputs = []
    for step, width in enumerate((1, 4, 2)):
        row = np.arange(width)[None] + 10 * step
        lists = LogprobsLists(row, -row / 10.0, np.array([1]))
        end = FinishReason.STOP if step == 2 else None
        output = EngineCoreOutput("a", [10 * step], new_logprobs=lists, finish_reason=end)
        group = EngineCoreOutputs(outputs=[output])
        monkeypatch.setattr(Scheduler, "update_from_output", lambda *ignored, g=group: {0: g})
        scheduler.update_from_output(None, None)
        outputs.append(output)
    final = outputs[-1].new_logprobs
    assert final is not None
    np.testing.assert_array_equal(final.logprob_token_ids, [[0], [10], [20]])
    np.testing.assert_allclose(final.logprobs, [[0.0], [-1.0], [-2.0]])
