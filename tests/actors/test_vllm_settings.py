"""Settings are refused before anything starts, and the environment keeps the engine at home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.vllm_settings import VllmSettings, engine_environment
from correction.errors import ConfigError

CPU = VllmSettings(Path("model"), Path("segments"), threads=3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "auto"),
        ("device", "tpu"),
        ("max_context_tokens", 0),
        ("max_running_requests", 0),
        ("threads", 0),
        ("tensor_parallel_size", 0),
        ("head_tokens", -1),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("kv_cache_bytes", None),
        ("enforce_eager", False),
    ],
)
def test_impossible_setting_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{key}"):
        replace(CPU, **{key: value})  # type: ignore[arg-type]


def test_no_engine_calls_home_or_unpickles() -> None:
    for settings in (CPU, replace(CPU, device="cuda")):
        environment = engine_environment(settings)
        assert environment["VLLM_NO_USAGE_STATS"] == environment["HF_HUB_OFFLINE"] == "1"
        assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


def test_threads_are_set_and_not_pinned_on_cpu_only() -> None:
    environment = engine_environment(CPU)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "OMP_NUM_THREADS" not in engine_environment(replace(CPU, device="cuda"))
    split = engine_environment(replace(CPU, tensor_parallel_size=2))
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in split
