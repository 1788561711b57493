"""Evaluations count what ended; what failed has no reward."""

from __future__ import annotations

import pytest

from cluster.evaluation import evaluation_event
from cluster.supervisor import stall_cause
from correction.versions import PolicyVersion


def test_failed_episodes_are_outside_the_mean() -> None:
    event = evaluation_event([1.0, None, 0.0, 1.0, None], PolicyVersion(0, 3), 1.0, 2.0)
    assert (event.tasks, event.failed) == (3, 2)
    assert event.success == pytest.approx(2 / 3)
    assert event.low < event.success < event.high


def test_a_stall_names_what_was_dropped_and_what_failed_first() -> None:
    said = stall_cause({"overflow": 8, "invalid": 1}, {"overflow": "a prompt of 200 tokens"})
    assert said == "; dropped so far: 1 invalid, 8 overflow; first overflow: a prompt of 200 tokens"
    assert stall_cause({}, {}) == ""
