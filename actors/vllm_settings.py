"""Settings of the vLLM engine and the environment it needs; imports nothing heavy.

The environment must be set before vLLM is first imported, so it is computed here and set by whoever
starts the engine's process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from actors.trajectory.record import KvMode
from actors.weights import DTYPES
from correction.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How one engine is built.

    model_path: a model folder that transformers can load; its weights are those of the initial
        version. segment_directory: where the weights of later versions are shared on this node.
    dtype: of weights and activations, one of DTYPES. Never automatic: vLLM would quietly turn a
        float32 checkpoint into bfloat16.
    max_context_tokens: most tokens, observed and sampled, of one request.
    max_running_requests: requests that are sampled at once; more wait their turn.
    kv_cache_bytes: memory for the KV cache; None lets vLLM take `gpu_memory_utilization` of the
        device. On CPU it must be given.
    threads: OpenMP threads of the engine on CPU; ignored on GPU.
    enforce_eager: no graph capture. Always true on CPU, where compiled graphs may keep pointers
        into weights that a swap has replaced.
    prefix_caching: reuse the KV of common prefixes, which multi-turn episodes live on.
    head_tokens: most head tokens that a request may ask for (`SamplingParameters`).
    seed: of the sampler; give every engine another.
    start_timeout_s: how long the engine may take to load and warm up.
    """

    model_path: Path
    segment_directory: Path
    dtype: str = "float32"
    max_context_tokens: int = 1024
    max_running_requests: int = 64
    kv_cache_bytes: int | None = 256 * 1024**2
    gpu_memory_utilization: float = 0.9
    threads: int = 1
    enforce_eager: bool = True
    prefix_caching: bool = True
    kv_mode: KvMode = KvMode.RECOMPUTE
    head_tokens: int = 0
    seed: int = 0
    tensor_parallel_size: int = 1
    device: str = "cpu"
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, "dtype", f"must be one of {DTYPES}", self.dtype)
        _require(self.device in ("cpu", "cuda"), "device", "must be cpu or cuda", self.device)
        for name in ("max_context_tokens", "max_running_requests", "threads"):
            _require(getattr(self, name) >= 1, name, "must be >= 1", getattr(self, name))
        _require(self.head_tokens >= 0, "head_tokens", "must be >= 0", self.head_tokens)
        _require(
            self.tensor_parallel_size >= 1,
            "tensor_parallel_size",
            "must be >= 1",
            self.tensor_parallel_size,
        )
        _require(
            0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            "must be in (0, 1]",
            self.gpu_memory_utilization,
        )
        if self.device == "cpu":
            _require(self.kv_cache_bytes is not None, "kv_cache_bytes", "is needed on CPU", None)
            _require(self.enforce_eager, "enforce_eager", "must be true on CPU", False)


def engine_environment(settings: VllmSettings) -> dict[str, str]:
    """Environment variables of the engine's process, to be set before vLLM is imported.

    No network, no usage reports, no insecure serialisation. On CPU one process fewer, and threads
    that are not pinned: vLLM's own binding puts two engines of one machine on the same core.
    """
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(settings.start_timeout_s)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.device == "cpu":
        environment |= {
            "OMP_NUM_THREADS": str(settings.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The process waits for a last message to be read that nobody reads any more.
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        }
        if settings.tensor_parallel_size == 1:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def _require(condition: bool, key: str, rule: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"engine.{key} {rule}, got {value!r}")
