"""SIGTERM and Ctrl-C: while a run goes on the first asks for an orderly end, else it ends at once.

A library may swallow the KeyboardInterrupt of a signal (Ray does while it starts) and put its own
handler in place of ours, so a signal is remembered, and asked for again where a phase begins.
"""

from __future__ import annotations

import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context: handles the signals inside, puts back what was there before."""

    def __init__(self) -> None:
        self._asked: str | None = None
        self._orderly = False

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self._install()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> str | None:
        """Name of the first signal that came."""
        return self._asked

    def check(self) -> None:
        """Take the signals back from whoever took them; raise KeyboardInterrupt if one came."""
        self._install()
        if self._asked is not None:
            raise KeyboardInterrupt

    @contextmanager
    def orderly(self) -> Iterator[None]:
        """Inside, the first signal only asks; the second raises KeyboardInterrupt."""
        self.check()
        self._orderly = True
        try:
            yield
        finally:
            self._orderly = False

    def _install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        again, self._asked = self._asked is not None, self._asked or signal.Signals(number).name
        if again or not self._orderly:
            raise KeyboardInterrupt
