"""The real engine: vLLM's AsyncLLM, the same on CPU and GPU.

    generate   token ids in; sampled ids, processed logprobs and version spans out
    swap       check segment ─▶ pause ─▶ load ─▶ resume ─▶ canary ─▶ the version moves

The engine's own process does the sampling and the loading; this object talks to it. A swap touches
nothing before the segment is checked; after that there is no way back: what fails is a dead engine.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from actors.engine import Completion, GenerationRequest
from actors.scratch import own_folder, remove_folder, remove_orphans
from actors.trajectory.record import KvMode
from actors.version_gate import VersionGate
from actors.vllm_arguments import canary_parameters, engine_arguments, sampling_parameters
from actors.vllm_completion import canary_mismatch, completion_of, version_runs_of
from actors.vllm_settings import VllmSettings, engine_environment
from actors.weight_segment import open_segment
from actors.weights import Canary, SwapReport, SwapRequest
from correction.errors import ConfigError, EngineError, InputError, SwapError
from correction.versions import PolicyVersion

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

_CANARY_PRIORITY = -1  # before every rollout: a full engine must not delay a proof
_LIVENESS_PERIOD_S = 0.25
_SOCKETS_PREFIX = "lagwise-engine-"


class VllmEngine:
    """An `actors.engine.Engine` on vLLM. Make it with `create`; it belongs to one event loop."""

    def __init__(
        self, settings: VllmSettings, llm: AsyncLLM, version: PolicyVersion, sockets: _Sockets
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._llm = llm
        self._gate = VersionGate(version)
        self._incarnation = uuid.uuid4().hex
        self._vocabulary_size: int = llm.model_config.get_vocab_size()
        self._closed = False
        self._running = 0
        self._counts = {"generated_tokens": 0, "requests": 0, "swaps": 0}
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def create(
        cls,
        settings: VllmSettings,
        initial_version: PolicyVersion,
        canary: Canary | None = None,
    ) -> VllmEngine:
        """Start vLLM on the model folder, whose weights are those of `initial_version`.

        With a canary that claim is proven before the engine is returned. Raises ConfigError if
        `engine_environment` was not set for this process, EngineError if vLLM does not start.
        """
        _check_environment(settings)
        sockets = _Sockets()
        try:
            llm = _start(settings, sockets.folder)
        except BaseException:
            sockets.remove()
            raise
        engine = cls(settings, llm, initial_version, sockets)
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await llm.update_weight_version(str(initial_version))
                if canary is not None:
                    engine._gate.announce(initial_version)
                    await engine._proof(await engine._submit(canary), canary, initial_version)
                    engine._gate.prove()
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def version(self) -> PolicyVersion:
        """Version whose weights are loaded and proven."""
        return self._gate.version

    @property
    def incarnation(self) -> str:
        """Identifies this engine process."""
        return self._incarnation

    @property
    def max_context_tokens(self) -> int:
        """Most tokens, observed and sampled, that one request may hold."""
        return self._settings.max_context_tokens

    @property
    def kv_mode(self) -> KvMode:
        """What a swap does to the KV cache of running requests."""
        return self._settings.kv_mode

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one turn; see the protocol. Raises InputError for a context that cannot be served
        and for a larger head than the engine was built for.

        Cancelling it aborts the request inside vLLM.
        """
        self._gate.check_alive()
        head_tokens = request.sampling.head_tokens
        asked_tokens = min(head_tokens, self._vocabulary_size)
        parameters = self._parameters(request, asked_tokens)
        started = time.perf_counter()
        self._running += 1
        try:
            output = await self._gate.run(self._final_output(request, parameters))
            completion = completion_of(
                output.outputs[0],
                time.perf_counter() - started,
                head_tokens=head_tokens,
                asked_tokens=asked_tokens,
            )
        except EngineError as failure:
            self._gate.fail(failure)
            raise
        finally:
            self._running -= 1
        await self._gate.release(run.version for run in completion.version_runs)
        self._counts["generated_tokens"] += len(completion.action_ids)
        self._counts["requests"] += 1
        return completion

    async def swap(self, request: SwapRequest) -> SwapReport:
        """Use newer weights; see the protocol. Goes on to its end if the caller is cancelled."""
        self._gate.check_alive()
        if len(request.manifest.canary.token_ids) < 2:
            raise InputError("a canary needs two tokens or more: a swap cannot be proven without")
        if not self._gate.is_news(request.manifest.version):
            return SwapReport(self.version)
        return await self._gate.alone(self._swap(request))

    @property
    def process_ids(self) -> tuple[int, ...]:
        """vLLM's own processes, besides this one: for accounting and fault injection."""
        return tuple(p.pid for p in self._llm.engine_core.resources.engine_manager.processes)

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
        """End vLLM's processes; whatever still waits raises EngineError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._gate.fail(EngineError("it was closed"))
        self._watcher.cancel()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would report the end as an error
        await asyncio.to_thread(self._llm.shutdown)  # it waits for the process to end
        self._llm.engine_core.resources.ctx.destroy(linger=0)  # which vLLM leaves to the collector
        self._sockets.remove()

    async def _final_output(
        self, request: GenerationRequest, parameters: SamplingParams
    ) -> RequestOutput:
        from vllm.inputs import tokens_input

        prompt = tokens_input(list(request.context_ids))
        with _vllm_errors():
            async for output in self._llm.generate(prompt, parameters, request.request_id):
                if output.finished:
                    return output
        raise EngineError("vLLM ended a request without an output")

    def _parameters(self, request: GenerationRequest, asked_tokens: int) -> SamplingParams:
        room_tokens = self.max_context_tokens - len(request.context_ids)
        if room_tokens < 1 or not request.context_ids:
            raise InputError(
                f"a context of {len(request.context_ids)} tokens does not leave room to sample in "
                f"{self.max_context_tokens}"
            )
        if not 0 <= min(request.context_ids) <= max(request.context_ids) < self._vocabulary_size:
            raise InputError(f"a context id lies outside the vocabulary ({self._vocabulary_size})")
        if not 0 <= request.sampling.head_tokens <= self._settings.head_tokens:
            raise InputError(
                f"a head of {request.sampling.head_tokens} tokens was asked for, this engine was "
                f"built for at most {self._settings.head_tokens}"
            )
        return sampling_parameters(request.sampling, room_tokens, asked_tokens)

    async def _swap(self, request: SwapRequest) -> SwapReport:
        phases_s: dict[str, float] = {}
        version = request.manifest.version
        with ExitStack() as held:
            with _timed(phases_s, "check"):
                segment = open_segment(
                    self._settings.segment_directory, request.segment, request.manifest
                )
                await asyncio.to_thread(held.enter_context, segment)
            mismatch = await self._gate.commit(
                version, request.deadline_s, self._load_and_prove(request, phases_s)
            )
        self._counts["swaps"] += 1
        stall_s = sum(phases_s[phase] for phase in ("pause", "load", "resume"))
        return SwapReport(version, phases_s, stall_s, mismatch)

    async def _load_and_prove(self, request: SwapRequest, phases_s: dict[str, float]) -> float:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from actors.vllm_transfer import update_info

        manifest = request.manifest
        info = update_info(request, self._settings.segment_directory)
        with _timed(phases_s, "pause"):
            # Not pause_generation: that sleeps for 20 ms, only to order a caller's view of events.
            await self._llm.engine_core.pause_scheduler_async(
                mode="keep", clear_cache=self.kv_mode is KvMode.RECOMPUTE
            )
        with _timed(phases_s, "load"):
            self._gate.announce(manifest.version)
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(info))
            await self._llm.finish_weight_update(str(manifest.version))
        with _timed(phases_s, "resume"):
            # Waiting there before the others are let go, the canary is in the first batch.
            canary = await self._submit(manifest.canary)
            await self._llm.resume_generation()
        with _timed(phases_s, "verify"):
            return await self._proof(canary, manifest.canary, manifest.version)

    async def _submit(self, canary: Canary) -> RequestOutputCollector:
        from vllm.inputs import tokens_input

        return await self._llm.add_request(
            f"canary-{uuid.uuid4().hex}",
            tokens_input(list(canary.token_ids)),
            canary_parameters(),
            priority=_CANARY_PRIORITY,
        )

    async def _proof(
        self, submitted: RequestOutputCollector, canary: Canary, version: PolicyVersion
    ) -> float:
        """Largest mismatch of the canary, through the path that serves every request.

        Raises SwapError if it is over the tolerance or not a number, or of another version.
        """
        with _vllm_errors():
            output = await submitted.get()
        sampled = output.outputs[0]
        runs = version_runs_of(sampled.weight_versions, len(sampled.token_ids))
        if [run.version for run in runs] != [version]:
            raise SwapError(f"the canary was served by {runs}, not by {version}")
        mismatch = canary_mismatch(canary, output.prompt_logprobs)
        if not mismatch <= canary.tolerance:
            raise SwapError(
                f"canary of {version}: engine and learner differ by {mismatch:.3g}, "
                f"tolerance {canary.tolerance:.3g}"
            )
        return mismatch

    async def _watch(self) -> None:
        """vLLM tells nobody that its process died, except requests that are running."""
        while not self._llm.errored:
            await asyncio.sleep(_LIVENESS_PERIOD_S)
        self._gate.fail(EngineError("vLLM's engine process died"))


class _Sockets:
    """A folder for vLLM's sockets, which it leaves behind; a killed engine's goes with the next."""

    def __init__(self) -> None:
        remove_orphans(Path(tempfile.gettempdir()), _SOCKETS_PREFIX, Path.is_socket)
        self.folder = Path(tempfile.mkdtemp(prefix=_SOCKETS_PREFIX))
        self._owned = own_folder(self.folder)

    def remove(self) -> None:
        remove_folder(self.folder, Path.is_socket)
        if self._owned is not None:
            os.close(self._owned)
            self._owned = None


def _start(settings: VllmSettings, sockets: Path) -> AsyncLLM:
    os.environ["VLLM_RPC_BASE_PATH"] = str(sockets)  # looked at when a socket is made
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(settings)))
    except Exception as cause:
        raise EngineError(f"vLLM did not start on {settings.model_path}: {cause}") from cause


def _check_environment(settings: VllmSettings) -> None:
    for name, value in engine_environment(settings).items():
        if os.environ.get(name) != value:
            raise ConfigError(f"set {name}={value} before the engine's process imports vLLM")


@contextmanager
def _timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    phases_s[name] = time.perf_counter() - started


@contextmanager
def _vllm_errors() -> Iterator[None]:
    """What vLLM raises when its engine has died or broken a request, as EngineError."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except (EngineDeadError, EngineGenerateError) as failure:
        raise EngineError(f"vLLM failed: {str(failure) or type(failure).__name__}") from failure
