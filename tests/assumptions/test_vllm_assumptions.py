"""What we use of vLLM from the inside, one test a thing. If an upgrade breaks one, it says which.

What only shows in a running engine (version spans, processed logprobs, KV recompute, the tied head)
is proven in tests/actors/test_vllm_engine.py.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.vllm_settings import VllmSettings, engine_environment

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn

SETTINGS = VllmSettings(Path("model"), Path("segments"))


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(SETTINGS).items():
            patch.setenv(name, value)
        yield


def parameters(function: Any) -> list[str]:  # noqa: ANN401
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_pinned_version() -> None:
    import vllm

    assert vllm.__version__.startswith("0.32.")


def test_environment_variables_are_still_known() -> None:
    from vllm import envs

    ours = {name for name in engine_environment(SETTINGS) if name.startswith("VLLM_")}
    assert ours <= set(envs.environment_variables)


def test_every_engine_argument_exists() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from actors.vllm_arguments import engine_arguments

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(engine_arguments(SETTINGS)) <= known


def test_behaviour_logprobs_must_be_asked_for() -> None:
    from vllm.config.model import LogprobsMode, ModelConfig

    assert "processed_logprobs" in LogprobsMode.__args__
    assert ModelConfig.logprobs_mode == "raw_logprobs"


def test_importing_our_worker_module_registers_the_backend_once() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from actors.vllm_transfer import BACKEND, SegmentTransferEngine

    assert WeightTransferEngineFactory._registry[BACKEND]() is SegmentTransferEngine
    with pytest.raises(ValueError, match="already registered"):
        WeightTransferEngineFactory.register_engine(BACKEND, SegmentTransferEngine)


def test_weight_transfer_engine_has_the_five_abstract_methods_that_ours_fills() -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from actors.vllm_transfer import SegmentTransferEngine

    assert WeightTransferEngine.__abstractmethods__ == {
        "init_transfer_engine",
        "start_weight_update",
        "receive_weights",
        "finish_weight_update",
        "shutdown",
    }
    assert not SegmentTransferEngine.__abstractmethods__


def test_worker_extension_is_found_by_name_and_clashes_with_nothing() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from actors.vllm_transfer import WORKER_EXTENSION, SegmentWorkerExtension

    assert resolve_obj_by_qualname(WORKER_EXTENSION) is SegmentWorkerExtension
    assert [name for name in dir(SegmentWorkerExtension) if not name.startswith("__")] == []


def test_layerwise_reload_takes_the_model_and_its_config() -> None:
    from vllm.model_executor.model_loader import reload

    assert parameters(reload.initialize_layerwise_reload) == ["model"]
    inner = inspect.unwrap(reload.layerwise.finalize_layerwise_processing)
    assert parameters(inner) == ["model", "model_config"]


def test_packed_head_does_not_follow_its_weight_until_it_is_packed_again() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(128, 64), requires_grad=False)
    method, x = UnquantizedEmbeddingMethod(), torch.randn(4, 64)
    method.process_weights_after_loading(layer)
    before = method.apply(layer, x).clone()
    layer.weight.mul_(2)
    torch.testing.assert_close(method.apply(layer, x), before)
    method.process_weights_after_loading(layer)
    torch.testing.assert_close(method.apply(layer, x), 2 * before)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("start_weight_update", []),
        ("update_weights", ["request"]),
        ("finish_weight_update", ["weight_version"]),
        ("update_weight_version", ["new_version"]),
        ("resume_generation", []),
    ],
)
def test_async_engine_has_the_weight_update_calls(name: str, wanted: list[str]) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    method = getattr(AsyncLLM, name)
    assert inspect.iscoroutinefunction(method)
    assert parameters(method) == wanted


def test_pause_keeps_requests_and_clears_the_cache_or_fails() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import AsyncMPClient

    assert parameters(AsyncMPClient.pause_scheduler_async) == ["mode", "clear_cache"]

    class Unclearable:
        def reset_prefix_cache(self, **options: bool) -> bool:
            assert options["reset_running_requests"]
            return False

    with pytest.raises(RuntimeError):  # so that nobody has to look at a returned bool
        EngineCore._reset_caches(Unclearable())


def test_requests_take_a_priority_and_hand_out_a_collector() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    assert "priority" in parameters(AsyncLLM.add_request)
    assert inspect.iscoroutinefunction(RequestOutputCollector.get)
    assert parameters(RequestOutputCollector.get) == []


def test_process_and_message_context_can_be_reached_to_be_ended() -> None:
    from vllm.v1.engine.core_client import BackgroundResources
    from vllm.v1.engine.utils import CoreEngineProcManager

    names = {field.name for field in dataclasses.fields(BackgroundResources)}
    assert {"ctx", "engine_manager", "engine_dead"} <= names
    assert "processes" in inspect.getsource(CoreEngineProcManager.__init__)


def test_version_spans_have_their_fields_and_come_with_an_output() -> None:
    from vllm.outputs import CompletionOutput, WeightVersionSpan

    assert [f.name for f in dataclasses.fields(WeightVersionSpan)] == ["version", "start", "end"]
    fields = {field.name for field in dataclasses.fields(CompletionOutput)}
    assert {"token_ids", "logprobs", "finish_reason", "weight_versions"} <= fields


def test_flat_logprobs_hold_one_range_a_position_and_prompts_begin_with_an_empty_one() -> None:
    from vllm.logprobs import append_logprobs_for_next_position, create_prompt_logprobs

    flat: Any = create_prompt_logprobs(flat_logprobs=True)
    append_logprobs_for_next_position(flat, [7], [-0.25], [None], rank=3, num_logprobs=0)
    assert (flat.start_indices, flat.end_indices) == ([0, 0], [0, 1])
    assert (flat.token_ids, flat.logprobs) == ([7], [-0.25])


def test_the_sampled_id_stands_before_the_likeliest_and_a_wider_row_is_cut() -> None:
    """The row of a batch in which another request asked for more."""
    from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs

    flat: Any = create_sample_logprobs(flat_logprobs=True)
    row = [7, 5, 7, 9], [-0.9, -0.6, -0.9, -3.0]
    append_logprobs_for_next_position(flat, *row, [None] * 4, rank=2, num_logprobs=2)
    assert (flat.start_indices, flat.end_indices) == ([0], [3])
    assert (flat.token_ids, flat.logprobs) == ([7, 5, 7], [-0.9, -0.6, -0.9])


def test_the_sampler_gathers_the_likeliest_of_one_row_and_the_sampled_id_of_the_same() -> None:
    from vllm.v1.sample.sampler import Sampler

    logprobs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    gathered = Sampler.gather_logprobs(logprobs, 2, torch.tensor([0]))
    assert gathered.logprob_token_ids.tolist() == [[0, 1, 3]]
    torch.testing.assert_close(gathered.logprobs.exp(), torch.tensor([[0.1, 0.4, 0.3]]))


@pytest.mark.parametrize(("head_tokens", "most"), [(0, 20), (20, 20), (21, 21), (128, 128)])
def test_more_logprobs_than_by_default_are_allowed_only_where_heads_need_them(
    head_tokens: int, most: int
) -> None:
    from actors.vllm_arguments import engine_arguments

    settings = dataclasses.replace(SETTINGS, head_tokens=head_tokens)
    assert engine_arguments(settings)["max_logprobs"] == most


def test_sampling_parameters_ask_for_the_whole_support_and_the_final_output() -> None:
    from vllm.sampling_params import RequestOutputKind

    from actors.trajectory.record import SamplingParameters
    from actors.vllm_arguments import canary_parameters, sampling_parameters

    asked = sampling_parameters(SamplingParameters(0.7, 100, (3, 5)), room_tokens=40)
    assert (asked.temperature, asked.max_tokens, asked.stop_token_ids) == (0.7, 40, [3, 5])
    assert asked.logprobs == 0
    assert sampling_parameters(SamplingParameters(0.7, 100), 40, head_tokens=8).logprobs == 8
    assert (asked.top_p, asked.top_k, asked.min_p) == (1.0, 0, 0.0)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (0, 0, 1)
    assert asked.ignore_eos
    assert asked.output_kind is RequestOutputKind.FINAL_ONLY
    canary = canary_parameters()
    assert (canary.prompt_logprobs, canary.temperature, canary.max_tokens) == (0, 1.0, 1)


def test_scheduler_has_the_two_methods_that_ours_extends() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    from actors.vllm_scheduler import LateLogprobsScheduler

    wanted = ["scheduler_output", "model_runner_output"]
    assert parameters(Scheduler.update_from_output) == wanted
    assert parameters(LateLogprobsScheduler.update_from_output) == wanted
    assert parameters(Scheduler.finish_requests) == ["request_ids", "finished_status"]
    assert LogprobsLists._fields == (
        "logprob_token_ids",
        "logprobs",
        "sampled_token_ranks",
        "cu_num_generated_tokens",
    )
    fields = EngineCoreOutput.__struct_fields__
    assert {"request_id", "new_logprobs", "finish_reason"} <= set(fields)
