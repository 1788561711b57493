"""Signals: an orderly end while a run goes on, an interruption that is never lost before."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from cluster.stop_signals import STOP_SIGNALS, StopSignals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_asks_and_the_second_interrupts(number: signal.Signals) -> None:
    with StopSignals() as stop, stop.orderly():
        assert stop.requested() is None
        signal.raise_signal(number)
        assert stop.requested() == number.name
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert stop.requested() == number.name


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_the_run_goes_on_one_interrupts(number: signal.Signals) -> None:
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_an_interruption_that_a_library_swallows_is_not_lost() -> None:
    with StopSignals() as stop:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
        with pytest.raises(KeyboardInterrupt), stop.orderly():
            pytest.fail("it went on")


def test_handlers_that_a_library_put_are_replaced_and_the_callers_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with stop.orderly():
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested() == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
