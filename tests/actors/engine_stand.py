"""A real engine and the learner that it is compared with: transformers models by version."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from actors.engine import Completion
from actors.trajectory.record import KvMode
from actors.vllm_engine import VllmEngine
from actors.vllm_settings import VllmSettings, engine_environment
from actors.weight_packing import pack
from actors.weight_segment import SegmentStore
from actors.weights import Canary, SwapRequest, WeightManifest
from correction.versions import PolicyVersion

T = TypeVar("T")
SEED = 20
VOCABULARY = 64
STOP_ID = 3
TEMPERATURE = 0.7
RUN = "engine-test"
CANARY_IDS = tuple(range(4, 28))


def make_model(tied: bool, llama: bool = False) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "eos_token_id": 1,
    }
    if llama:
        return LlamaForCausalLM(LlamaConfig(**sizes)).float()  # type: ignore[no-any-return]
    return Qwen3ForCausalLM(Qwen3Config(**sizes)).float()  # type: ignore[no-any-return]


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, ids: Sequence[int], temperature: float) -> torch.Tensor:
    """float32 [T - 1]: log-probability of each id after the first, given those before it."""
    logits = model(torch.tensor([list(ids)])).logits[0, :-1].float() / temperature
    sampled = torch.tensor(list(ids[1:])).unsqueeze(-1)
    result: torch.Tensor = logits.log_softmax(-1).gather(-1, sampled).squeeze(-1)
    return result


@dataclass
class Learner:
    """The other side of a swap: transformers models by version, published into a segment store."""

    store: SegmentStore
    models: dict[PolicyVersion, torch.nn.Module]

    @property
    def newest(self) -> PolicyVersion:
        return max(self.models)

    def train(self, scale: float = 0.02) -> PolicyVersion:
        """A version whose weights all differ from those of the one before."""
        import copy

        model = copy.deepcopy(self.models[self.newest])
        generator = torch.Generator().manual_seed(SEED + self.newest.step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
        version = self.newest.next_step()
        self.models[version] = model
        return version

    def publish(self, version: PolicyVersion, canary_error: float = 0.0) -> SwapRequest:
        model = self.models[version]
        packed = pack(model.named_parameters(), bucket_bytes=1 << 20)
        truth = logprobs_of(model, CANARY_IDS, 1.0).tolist()
        manifest = WeightManifest(
            run_id=RUN,
            version=version,
            tensors=packed.entries,
            bucket_bytes=tuple(bucket.nbytes for bucket in packed.buckets),
            bucket_checksums=packed.checksums,
            canary=Canary(CANARY_IDS, tuple(v + canary_error for v in truth), tolerance=1e-3),
        )
        return SwapRequest(manifest, self.store.write(manifest, packed.buckets), deadline_s=60)

    def worst_difference(self, context: Sequence[int], completion: Completion) -> float:
        """Largest |engine - transformers| over the sampled tokens, each by its own version."""
        ids = [*context, *completion.action_ids.tolist()]
        worst, at = 0.0, 0
        for run in completion.version_runs:
            truth = logprobs_of(self.models[run.version], ids, TEMPERATURE)[len(context) - 1 :]
            mine = torch.from_numpy(completion.behaviour_logprobs.copy())
            part = slice(at, at + run.length_tokens)
            worst = max(worst, float((mine[part] - truth[part]).abs().max()))
            at += run.length_tokens
        return worst


class Stand:
    """One engine, its learner and the loop that they live on."""

    def __init__(
        self,
        directory: Path,
        model: torch.nn.Module,
        kv_mode: KvMode = KvMode.RECOMPUTE,
        head_tokens: int = 0,
    ) -> None:
        model.save_pretrained(directory / "model")  # type: ignore[operator]
        self.directory = directory
        self.settings = VllmSettings(
            model_path=directory / "model",
            segment_directory=directory / "segments",
            max_context_tokens=400,
            max_running_requests=16,
            kv_cache_bytes=64 << 20,
            kv_mode=kv_mode,
            head_tokens=head_tokens,
        )
        self.patch = pytest.MonkeyPatch()
        for name, value in engine_environment(self.settings).items():
            self.patch.setenv(name, value)
        self.learner = Learner(
            SegmentStore(directory / "segments", RUN), {PolicyVersion(0, 0): model}
        )
        self.runner = asyncio.Runner()
        self.engine = self.run(self.create())

    async def create(self, canary: Canary | None = None) -> VllmEngine:
        return await VllmEngine.create(self.settings, PolicyVersion(0, 0), canary)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, 120))

    def close(self) -> None:
        self.run(self.engine.close())
        self.runner.close()
        self.learner.store.remove_all()
        self.patch.undo()
