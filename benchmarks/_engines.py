"""A tiny model and engine settings for the benchmarks of the engine."""

from __future__ import annotations

from pathlib import Path

from actors.vllm_settings import VllmSettings

SEED = 17
CONTEXT_TOKENS = 24


def tiny_model(folder: Path) -> Path:
    """A random model of the starter's size and kind; made once."""
    if not (folder / "config.json").is_file():
        import torch
        from transformers import PreTrainedTokenizerFast

        from learner.starter_tokenizer import save_tokenizer
        from learner.starter_training import StarterSettings, build_model

        torch.manual_seed(SEED)
        settings = StarterSettings()
        tokenizer: PreTrainedTokenizerFast = save_tokenizer(folder, settings.max_context_tokens)
        build_model(settings, tokenizer).save_pretrained(folder)
    return folder


def engine_settings(model: Path, run_id: str) -> VllmSettings:
    """The demo's engine, for 64 requests at once."""
    from actors.weight_segment import default_segment_directory

    return VllmSettings(
        model_path=model.resolve(),
        segment_directory=default_segment_directory(run_id),
        max_context_tokens=256,
        max_running_requests=64,
        kv_cache_bytes=64 * 2**20,
        gpu_memory_utilization=0.1,
        seed=SEED,
    )


def contexts(count: int, vocabulary: int = 250) -> list[list[int]]:
    """Random contexts."""
    import random

    draw = random.Random(SEED)
    return [[draw.randrange(3, vocabulary) for _ in range(CONTEXT_TOKENS)] for _ in range(count)]
