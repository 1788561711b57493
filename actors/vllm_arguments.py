"""What we ask of vLLM: the arguments of an engine, of a rollout's request and of a canary's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.trajectory.record import SamplingParameters
from actors.vllm_settings import VllmSettings

if TYPE_CHECKING:
    from vllm import SamplingParams


def sampling_parameters(
    sampling: SamplingParameters, room_tokens: int, head_tokens: int = 0
) -> SamplingParams:
    """vLLM's parameters for one turn that fits `room_tokens`.

    The whole support is sampled, only the given stop tokens end a turn (a model's own end token
    must be among them), and the sampled id's logprob is returned, with those of the `head_tokens`
    likeliest ids.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=1.0,
        top_k=0,
        max_tokens=min(sampling.max_turn_tokens, room_tokens),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=head_tokens,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def canary_parameters() -> SamplingParams:
    """vLLM's parameters that score a prompt at temperature 1 and sample one token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs (and, for comparison, of its LLM)."""
    from vllm.config import ModelConfig, WeightTransferConfig

    from actors.vllm_scheduler import SCHEDULER
    from actors.vllm_transfer import BACKEND, WORKER_EXTENSION

    return {
        # On GPU vLLM has a scheduler of its own for running ahead of the device.
        "scheduler_cls": SCHEDULER if settings.device == "cpu" else None,
        "model": str(settings.model_path),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's own: it may switch on top_k and top_p
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_context_tokens,
        "max_num_seqs": settings.max_running_requests,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_prefix_caching": settings.prefix_caching,
        "enforce_eager": settings.enforce_eager,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(settings.head_tokens, ModelConfig.max_logprobs),
        "scheduling_policy": "priority",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    }
