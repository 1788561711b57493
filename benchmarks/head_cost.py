"""What do the heads of Score Centering cost in generation, and in bytes?

The 64 requests of 64 tokens of `generation`, through one `VllmEngine` in a Ray actor, with heads of
several sizes; the sizes take turns within each round, and ratios are medians over rounds against
the burst without heads of the same round. Bytes are those of the wire format, which tests pin.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from actors.trajectory.head import BYTES_PER_HEAD_TOKEN
from benchmarks._engines import engine_settings, tiny_model
from benchmarks.generation import Ours

HEAD_TOKENS = (0, 8, 32, 128)
ROUNDS = 15


def measure() -> dict[str, object]:
    """Rates, ratios to no head, and bytes a token on the wire, by size of the head."""
    from cluster.ray_environment import set_ray_environment

    set_ray_environment()
    import ray

    from actors.vllm_settings import engine_environment
    from cluster.ray_session import ray_session

    settings = replace(
        engine_settings(tiny_model(Path(".cache/bench-model")), "bench-head-cost"),
        head_tokens=max(HEAD_TOKENS),
    )
    with ray_session(num_cpus=1):
        environment = {"runtime_env": {"env_vars": engine_environment(settings)}}
        engine = ray.remote(num_cpus=0)(Ours).options(**environment).remote()
        ray.get(engine.start.remote(settings))
        rates = [
            [ray.get(engine.burst.remote(f"{number}/{size}", size)) for size in HEAD_TOKENS]
            for number in range(ROUNDS + 1)
        ][1:]
        ray.get(engine.close.remote())
    by_size = dict(zip(HEAD_TOKENS, zip(*rates, strict=True), strict=True))
    ratios = {
        size: [mine / bare for mine, bare in zip(by_size[size], by_size[0], strict=True)]
        for size in HEAD_TOKENS
    }
    return {
        "tokens_per_s": {size: round(statistics.median(by_size[size])) for size in HEAD_TOKENS},
        "ratio_to_no_head": {size: round(statistics.median(ratios[size]), 3) for size in ratios},
        "ratio_quartiles": {
            size: [round(q, 3) for q in statistics.quantiles(ratios[size], n=4)] for size in ratios
        },
        "wire_bytes_per_token": {size: 8 + size * BYTES_PER_HEAD_TOKEN for size in HEAD_TOKENS},
        "rounds": ROUNDS,
    }
