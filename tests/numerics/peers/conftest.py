"""Prints what was compared, at the end of the run."""

from __future__ import annotations

import pytest

from tests.numerics.peers.comparison import TABLE, table_lines
from tests.numerics.peers.peer_batches import SEED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One row a function and peer."""
    if TABLE:
        terminalreporter.section(f"peers (seeds from {SEED})")
        for line in table_lines(TABLE):
            terminalreporter.write_line(line)
