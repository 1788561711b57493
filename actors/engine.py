"""The engine protocol: token ids in, sampled tokens with their logprobs and versions out.

One real implementation (`vllm_engine.py`, CPU and GPU alike) and one scripted
(`scripted_engine.py`, ships with the product for tests, dry runs and the simulator).

Contract
    consumes    GenerationRequest, SwapRequest
    produces    Completion, SwapReport
    waits for   nothing but its own model
    invariants  every sampled token carries the version of the weights that sampled it; a
                completion that holds tokens of a version whose canary has not passed is held
                back until it has; if the canary fails, every such request ends in EngineError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from actors.trajectory.record import Float32, Int32, KvMode, SamplingParameters, VersionRun
from actors.weights import SwapReport, SwapRequest
from correction.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One model call. request_id is unique; context_ids is the whole context, never re-encoded."""

    request_id: str
    context_ids: Sequence[int]
    sampling: SamplingParameters


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Sampled tokens of one call, as in `Turn`. finish: "stop" or "length".

    head_ids, head_logprobs: [m, K], K being the request's `head_tokens`; None where that is 0.
    """

    action_ids: Int32
    behaviour_logprobs: Float32
    version_runs: tuple[VersionRun, ...]
    finish: str
    generation_s: float
    head_ids: Int32 | None = None
    head_logprobs: Float32 | None = None

    @property
    def is_sound(self) -> bool:
        """Whether the sampled tokens' logprobs are finite and those of the heads are numbers."""
        heads = self.head_logprobs
        return bool(
            np.isfinite(self.behaviour_logprobs).all()
            and (heads is None or not np.isnan(heads).any())
        )


class Engine(Protocol):
    """A text generation backend behind one rollout actor."""

    @property
    def version(self) -> PolicyVersion:
        """Version whose weights are loaded and proven."""
        ...

    @property
    def incarnation(self) -> str:
        """Identifies this engine process; a restarted engine has another."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Most tokens, observed and sampled, that one request may hold."""
        ...

    @property
    def kv_mode(self) -> KvMode:
        """What a swap does to the KV cache of running requests."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one turn. Raises EngineError when the engine can serve no more."""
        ...

    async def swap(self, request: SwapRequest) -> SwapReport:
        """Start using newer weights while requests are running.

        Raises SwapError when the weights could not be loaded or the canary failed: the version
        has not moved, the engine serves nothing more and must be replaced. Raises SwapRefused
        when the update was refused before anything was touched (segment superseded or corrupt,
        another swap running): the engine goes on serving its old version. A version that is not
        newer is skipped: the report then names the current version and has no phases.
        """
        ...

    def check_alive(self) -> None:
        """Raise EngineError with the first cause once the engine can serve no more."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges of the engine: `generated_tokens`, `running_requests`, ..."""
        ...

    async def close(self) -> None:
        """Release processes and memory. Idempotent."""
        ...
