"""Which version an engine may answer with, and whether it may answer at all.

    loaded ──announce──▶ pending ──prove──▶ proven: completions that waited are released
                            └──────fail───▶ dead: everything that waits or comes later raises

Both engines stand on it, so that the rule exists once: tokens of a version whose canary has not
passed leave the engine only after it has, and the first cause of a death is the one reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar, cast

from correction.errors import EngineError, SwapError, SwapRefused
from correction.versions import PolicyVersion

T = TypeVar("T")


class VersionGate:
    """State of one engine; belongs to one event loop.

    The initial version is taken from whoever started the engine. It serves, but a swap to that same
    version is still news, because no canary has confirmed it.
    """

    def __init__(self, initial: PolicyVersion) -> None:
        self._proven = initial
        self._confirmed = False
        self._served = {initial}
        self._pending: PolicyVersion | None = None
        self._proof: asyncio.Future[None] | None = None
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cause: BaseException | None = None
        self._swap: asyncio.Task[Any] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self.held = 0
        """Completions that are waiting for a proof right now."""

    @property
    def version(self) -> PolicyVersion:
        """The newest proven version."""
        return self._proven

    @property
    def cause(self) -> BaseException | None:
        """Why the engine died; None while it lives."""
        return self._cause

    def is_news(self, version: PolicyVersion) -> bool:
        """Whether a swap to `version` would change or confirm anything."""
        return version > self._proven or (version == self._proven and not self._confirmed)

    def announce(self, version: PolicyVersion) -> None:
        """Tokens of `version` may appear from now on; they are held until it is proven."""
        self._served.discard(version)
        self._pending = version
        self._proof = asyncio.get_running_loop().create_future()

    def prove(self) -> None:
        """The canary of the announced version passed. Not after a death."""
        if self._pending is None or self._proof is None:
            raise EngineError("no version is waiting for its proof")
        self.check_alive()
        self._proven = self._pending
        self._confirmed = True
        self._served.add(self._pending)
        self._proof.set_result(None)
        self._pending = self._proof = None

    def fail(self, cause: BaseException) -> None:
        """The engine is dead. The first cause counts, later ones are its consequences."""
        if self._cause is None:
            self._cause = cause
            self._death.set_result(None)

    def check_alive(self) -> None:
        """Raises EngineError with the first cause once the engine is dead."""
        if self._cause is not None:
            raise EngineError(f"the engine is dead: {self._cause}") from self._cause

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, but no longer than the engine lives.

        Cancellation reaches `work`, which may go on for a moment to clean up. Raises EngineError
        as soon as the engine dies.
        """
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        try:
            await _first_of(task, self._death)
            self.check_alive()
            return task.result()
        finally:
            self._let_go(task)

    async def alone(self, swap: Coroutine[Any, Any, T]) -> T:
        """Await `swap`, one at a time; it goes on to its end if the caller is cancelled.

        Raises SwapRefused ("busy") while another one runs.
        """
        if self._swap is not None:
            swap.close()
            raise SwapRefused("busy", "another swap is running")
        self._swap = asyncio.create_task(swap)
        self._swap.add_done_callback(self._swap_ended)
        return cast(T, await asyncio.shield(self._swap))

    async def commit(
        self, version: PolicyVersion, deadline_s: float, load_and_prove: Coroutine[Any, Any, T]
    ) -> T:
        """Await the part of a swap from which there is no way back; then the version moves.

        Raises SwapError, and the engine is dead, if it fails or outlasts its deadline.
        """
        try:
            async with asyncio.timeout(deadline_s):
                outcome = await self.run(load_and_prove)
        except Exception as cause:
            reason = str(cause) or f"{type(cause).__name__} after {deadline_s} s"
            failure = SwapError(f"swap to {version} failed: {reason}")
            self.fail(failure)
            raise failure from cause
        self.prove()
        return outcome

    async def release(self, versions: Iterable[PolicyVersion]) -> None:
        """Return when tokens of all `versions` may leave. Raises EngineError for an unknown one."""
        self.check_alive()
        for version in versions:
            if version in self._served:
                continue
            if version != self._pending or self._proof is None:
                raise EngineError(f"tokens carry version {version}, which was never loaded")
            self.held += 1
            try:
                await _first_of(self._proof, self._death)
            finally:
                self.held -= 1
            self.check_alive()

    def _swap_ended(self, task: asyncio.Task[Any]) -> None:
        self._swap = None
        if not task.cancelled():
            task.exception()  # retrieved here, because the caller may have been cancelled

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        """Cancel without waiting; keep the task alive and its outcome retrieved."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        task.cancel()


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
