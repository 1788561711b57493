"""How much of bare vLLM's speed is left when tokens come through a rollout actor's engine?

The same 64 requests of 64 tokens, temperature 0.7, processed logprobs, same engine arguments: once
through `VllmEngine` (AsyncLLM) in a Ray actor, once through `LLM.generate` in a Ray actor. Both
engines live in one session; rounds alternate; the ratio is the median of paired rounds.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks._engines import contexts, engine_settings, tiny_model

REQUESTS, TOKENS, ROUNDS = 64, 64, 15


class Ours:
    """The engine that a rollout actor holds."""

    async def start(self, settings: Any) -> None:  # noqa: ANN401
        """Start it."""
        from actors.vllm_engine import VllmEngine
        from correction.versions import PolicyVersion

        self._engine = await VllmEngine.create(settings, PolicyVersion(0, 0))

    async def burst(self, number: int, head_tokens: int = 0) -> float:
        """Tokens a second over all requests at once."""
        import asyncio

        from actors.engine import GenerationRequest
        from actors.trajectory.record import SamplingParameters

        sampling = SamplingParameters(0.7, TOKENS, (), head_tokens)
        began = time.perf_counter()
        done = await asyncio.gather(
            *(
                self._engine.generate(GenerationRequest(f"{number}-{k}", ids, sampling))
                for k, ids in enumerate(contexts(REQUESTS))
            )
        )
        return sum(len(c.action_ids) for c in done) / (time.perf_counter() - began)

    async def close(self) -> None:
        """End it."""
        await self._engine.close()


class Bare:
    """vLLM's own offline engine with the same arguments and its own scheduler."""

    def start(self, settings: Any) -> None:  # noqa: ANN401
        """Start it."""
        from vllm import LLM

        from actors.vllm_arguments import engine_arguments

        arguments = engine_arguments(settings)
        for name in ("disable_log_stats", "scheduler_cls"):
            arguments.pop(name, None)
        self._llm = LLM(**arguments)

    def burst(self, number: int) -> float:
        """Tokens a second over all requests at once."""
        from actors.trajectory.record import SamplingParameters
        from actors.vllm_arguments import sampling_parameters

        sampling = sampling_parameters(SamplingParameters(0.7, TOKENS, ()), TOKENS)
        prompts = [{"prompt_token_ids": ids} for ids in contexts(REQUESTS)]
        began = time.perf_counter()
        done = self._llm.generate(prompts, [sampling] * REQUESTS, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in done)
        return tokens / (time.perf_counter() - began)


def measure() -> dict[str, object]:
    """Rates of both and their ratio."""
    from cluster.ray_environment import set_ray_environment

    set_ray_environment()
    import ray

    from actors.vllm_settings import engine_environment
    from cluster.ray_session import ray_session

    settings = engine_settings(tiny_model(Path(".cache/bench-model")), "bench-generation")
    with ray_session(num_cpus=2):
        environment = {"runtime_env": {"env_vars": engine_environment(settings)}}
        ours = ray.remote(num_cpus=0)(Ours).options(**environment).remote()
        bare = ray.remote(num_cpus=0)(Bare).options(**environment).remote()
        ray.get([ours.start.remote(settings), bare.start.remote(settings)])
        ray.get(bare.burst.remote(-1))
        ray.get(ours.burst.remote(-1))
        rates = [
            (ray.get(bare.burst.remote(n)), ray.get(ours.burst.remote(n))) for n in range(ROUNDS)
        ]
        ray.get(ours.close.remote())
    ratios = [mine / theirs for theirs, mine in rates]
    return {
        "bare_tokens_per_s": round(statistics.median(theirs for theirs, _ in rates)),
        "actor_tokens_per_s": round(statistics.median(mine for _, mine in rates)),
        "ratio_median_of_pairs": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)],
        "rounds": ROUNDS,
    }
