"""How long does generation stand still in a swap, and what do its phases cost?

30 swaps of the starter-size model while 64 requests are always running on the engine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._engines import contexts, engine_settings, tiny_model

if TYPE_CHECKING:
    from actors.weights import SwapReport

SWAPS, REQUESTS, GAP_S = 30, 64, 0.3
TOLERANCE = 1e-3


def measure() -> dict[str, object]:
    """Seconds of stall and of each phase."""
    import os

    from actors.vllm_settings import engine_environment

    settings = engine_settings(tiny_model(Path(".cache/bench-model")), "bench-swap")
    os.environ.update(engine_environment(settings))
    reports = asyncio.run(_swaps(settings))
    result: dict[str, object] = {
        "stall_s_median": _median(report.stall_s for report in reports),
        "stall_s_max": round(max(report.stall_s for report in reports), 4),
        "canary_mismatch_max": max(report.mismatch for report in reports),
    }
    for phase in reports[0].phases_s:
        result[f"{phase}_s_median"] = _median(report.phases_s[phase] for report in reports)
    return result


async def _swaps(settings: object) -> list[SwapReport]:
    import torch
    from transformers import AutoModelForCausalLM

    from actors.engine import GenerationRequest
    from actors.trajectory.record import SamplingParameters
    from actors.vllm_engine import VllmEngine
    from actors.vllm_settings import VllmSettings
    from actors.weight_packing import pack
    from actors.weight_segment import SegmentStore
    from actors.weights import Canary, SwapRequest, WeightManifest
    from correction.versions import PolicyVersion

    assert isinstance(settings, VllmSettings)
    model = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=torch.float32)
    store = SegmentStore(settings.segment_directory, "bench-swap")
    engine = await VllmEngine.create(settings, PolicyVersion(0, 0))
    ids = contexts(1)[0]

    def publish(step: int) -> SwapRequest:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0005)
            logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        logprobs = logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        packed = pack(model.named_parameters(), 2**24)
        manifest = WeightManifest(
            "bench-swap",
            PolicyVersion(0, step),
            packed.entries,
            tuple(len(bucket) for bucket in packed.buckets),
            packed.checksums,
            Canary(tuple(ids), tuple(logprobs), TOLERANCE),
        )
        return SwapRequest(manifest, store.write(manifest, packed.buckets))

    stopped = False

    async def keep_busy(number: int, context: list[int]) -> None:
        turn = 0
        while not stopped:
            request = GenerationRequest(
                f"{number}-{turn}", context, SamplingParameters(0.7, 100, ())
            )
            await engine.generate(request)
            turn += 1

    jobs = [asyncio.create_task(keep_busy(n, c)) for n, c in enumerate(contexts(REQUESTS))]
    await asyncio.sleep(2)
    reports = []
    for step in range(1, SWAPS + 1):
        reports.append(await engine.swap(publish(step)))
        await asyncio.sleep(GAP_S)
    stopped = True
    await asyncio.gather(*jobs)
    await engine.close()
    store.remove_all()
    return reports


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)
