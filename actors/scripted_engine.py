"""A deterministic engine that writes what a script says: for tests, dry runs and the simulator.

It keeps the protocol of `actors.engine` in full: versions per token, swaps in mid-generation that
hold unproven tokens back, death with its first cause. It needs no model, and no real time either
when `sleep` is a virtual clock's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from actors.engine import Completion, GenerationRequest
from actors.trajectory.head import padded_head
from actors.trajectory.record import Float32, Int32, KvMode, VersionRun
from actors.version_gate import VersionGate
from actors.weights import SwapReport, SwapRequest
from correction.errors import EngineError, InputError, SwapError, SwapRefused
from correction.versions import PolicyVersion

Sleep = Callable[[float], Awaitable[None]]
Write = Callable[[GenerationRequest], Sequence[int]]
"""The ids that a request samples, its stop token included."""
Others = Callable[[int, PolicyVersion], Mapping[int, float]]
"""Logprobs of other ids than the sampled one, at a place where a version sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineScript:
    """What a scripted engine does. Calls are counted from 0.

    write: what each request samples; cut at its first stop token and at the token budget.
    logprob: behaviour logprob of a token id under a version.
    others: what a head holds besides the sampled token; by default nothing.
    step_s, tokens_per_step: generation sleeps `step_s` before every `tokens_per_step` tokens.
    pause_s, load_s, resume_s, verify_s: how long the phases of a swap take.
    mismatch: what the canary measures in a swap that passes.
    dies_at_generate: calls of `generate` that kill the engine.
    fails_load_at, fails_canary_at: calls of `swap` that fail, and kill the engine.
    refuses_at: calls of `swap` that are refused as superseded, harming nothing.
    """

    write: Write
    logprob: Callable[[int, PolicyVersion], float] = lambda token_id, version: -1.0
    others: Others = lambda token_id, version: {}
    step_s: float = 0.0
    tokens_per_step: int = 1
    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0
    verify_s: float = 0.0
    mismatch: float = 0.0
    dies_at_generate: frozenset[int] = frozenset()
    fails_load_at: frozenset[int] = frozenset()
    fails_canary_at: frozenset[int] = frozenset()
    refuses_at: frozenset[int] = frozenset()


class ScriptedEngine:
    """An `actors.engine.Engine` that follows an EngineScript. Belongs to one event loop."""

    def __init__(
        self,
        script: EngineScript,
        initial_version: PolicyVersion,
        *,
        max_context_tokens: int = 1024,
        kv_mode: KvMode = KvMode.RECOMPUTE,
        incarnation: str = "scripted",
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._script = script
        self._sleep = sleep
        self._gate = VersionGate(initial_version)
        self._loaded = initial_version
        self._max_context_tokens = max_context_tokens
        self._kv_mode = kv_mode
        self._incarnation = incarnation
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._running = 0
        self._calls = {"generate": 0, "swap": 0}
        self._counts = {"generated_tokens": 0, "requests": 0, "swaps": 0}

    @property
    def version(self) -> PolicyVersion:
        """Version whose weights are loaded and proven."""
        return self._gate.version

    @property
    def incarnation(self) -> str:
        """Identifies this engine."""
        return self._incarnation

    @property
    def max_context_tokens(self) -> int:
        """Most tokens, observed and sampled, that one request may hold."""
        return self._max_context_tokens

    @property
    def kv_mode(self) -> KvMode:
        """What a swap does to the KV cache of running requests."""
        return self._kv_mode

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample what the script says; see the protocol."""
        self._gate.check_alive()
        call = self._count("generate")
        token_ids, finish = self._planned(request)
        self._running += 1
        try:
            if call in self._script.dies_at_generate:
                self._gate.fail(EngineError(f"scripted death at generate call {call}"))
            versions = await self._gate.run(self._sample(len(token_ids)))
        finally:
            self._running -= 1
        await self._gate.release(versions)
        self._counts["generated_tokens"] += len(token_ids)
        self._counts["requests"] += 1
        logprobs = map(self._script.logprob, token_ids, versions)
        heads = self._heads(token_ids, versions, request.sampling.head_tokens)
        head_ids, head_logprobs = heads or (None, None)
        return Completion(
            action_ids=np.asarray(token_ids, np.int32),
            behaviour_logprobs=np.fromiter(logprobs, np.float32, len(token_ids)),
            version_runs=_runs(versions),
            finish=finish,
            generation_s=self._steps(len(token_ids)) * self._script.step_s,
            head_ids=head_ids,
            head_logprobs=head_logprobs,
        )

    async def swap(self, request: SwapRequest) -> SwapReport:
        """Move to the version of the request's manifest; its segment is not read."""
        self._gate.check_alive()
        if not self._gate.is_news(request.manifest.version):
            return SwapReport(self.version)
        return await self._gate.alone(self._swap(request))

    def check_alive(self) -> None:
        """Raise EngineError with the first cause once the engine can serve no more."""
        self._gate.check_alive()

    def stats(self) -> Mapping[str, float]:
        """generated_tokens, requests, swaps: so far. running_requests, held_requests: now."""
        return {
            **self._counts,
            "running_requests": self._running,
            "held_requests": self._gate.held,
        }

    async def close(self) -> None:
        """Whatever still waits raises EngineError. Idempotent."""
        self._gate.fail(EngineError("it was closed"))

    def _count(self, method: str) -> int:
        self._calls[method] += 1
        return self._calls[method] - 1

    def _planned(self, request: GenerationRequest) -> tuple[list[int], str]:
        room_tokens = self._max_context_tokens - len(request.context_ids)
        if room_tokens < 1 or not request.context_ids:
            raise InputError(f"a context of {len(request.context_ids)} tokens leaves no room")
        budget_tokens = min(request.sampling.max_turn_tokens, room_tokens)
        token_ids = list(self._script.write(request))[:budget_tokens]
        for place, token_id in enumerate(token_ids):
            if token_id in request.sampling.stop_token_ids:
                return token_ids[: place + 1], "stop"
        if len(token_ids) < budget_tokens:
            raise InputError("the script wrote neither a stop token nor the whole budget")
        return token_ids, "length"

    def _heads(
        self, token_ids: Sequence[int], versions: Sequence[PolicyVersion], head_tokens: int
    ) -> tuple[Int32, Float32] | None:
        """The likeliest of what the script says of each place, [m, K]; None if not asked for."""
        if not head_tokens:
            return None
        heads = []
        for token_id, version in zip(token_ids, versions, strict=True):
            known = {**self._script.others(token_id, version)}
            known[token_id] = self._script.logprob(token_id, version)
            head = sorted(known.items(), key=lambda item: -item[1])[:head_tokens]
            ids, logprobs = (np.array([column]) for column in zip(*head, strict=True))
            heads.append(padded_head(ids, logprobs, head_tokens))
        return (np.concatenate([ids for ids, _ in heads]), np.concatenate([lp for _, lp in heads]))

    async def _sample(self, tokens: int) -> list[PolicyVersion]:
        """The version of each token: that of the weights at the moment it is sampled."""
        versions: list[PolicyVersion] = []
        for _ in range(self._steps(tokens)):
            await self._sleep(self._script.step_s)
            await self._unpaused.wait()
            versions += [self._loaded] * self._script.tokens_per_step
        return versions[:tokens]

    def _steps(self, tokens: int) -> int:
        return -(-tokens // self._script.tokens_per_step)

    async def _swap(self, request: SwapRequest) -> SwapReport:
        call = self._count("swap")
        if call in self._script.refuses_at:
            raise SwapRefused("superseded", f"scripted at swap call {call}")
        version = request.manifest.version
        work = self._load_and_prove(version, call)
        await self._gate.commit(version, request.deadline_s, work)
        self._counts["swaps"] += 1
        return self._report(version)

    async def _load_and_prove(self, version: PolicyVersion, call: int) -> None:
        script = self._script
        self._unpaused.clear()
        await self._sleep(script.pause_s)
        self._gate.announce(version)
        await self._sleep(script.load_s)
        if call in script.fails_load_at:
            raise SwapError(f"scripted load failure at swap call {call}")
        self._loaded = version
        await self._sleep(script.resume_s)
        self._unpaused.set()
        await self._sleep(script.verify_s)
        if call in script.fails_canary_at:
            raise SwapError(f"scripted canary failure at swap call {call}")

    def _report(self, version: PolicyVersion) -> SwapReport:
        script = self._script
        phases_s = {
            "check": 0.0,
            "pause": script.pause_s,
            "load": script.load_s,
            "resume": script.resume_s,
            "verify": script.verify_s,
        }
        stall_s = script.pause_s + script.load_s + script.resume_s
        return SwapReport(version, phases_s, stall_s, script.mismatch)


def _runs(versions: Sequence[PolicyVersion]) -> tuple[VersionRun, ...]:
    return tuple(VersionRun(version, len(list(same))) for version, same in groupby(versions))
