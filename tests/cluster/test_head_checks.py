"""Heads are refused before a run starts where codec or queue could not hold them."""

from __future__ import annotations

from typing import Any

import pytest

from actors.trajectory.frame import MAX_GROUP_BYTES
from actors.trajectory.head import BYTES_PER_HEAD_TOKEN
from cluster.config import RunConfig, parse_config
from cluster.derived import group_bytes, queue_groups
from cluster.head_checks import heads_fit

ROLLOUT = {"group_size": 8, "max_turns": 2, "max_turn_tokens": 50}


def config_of(rollout: dict[str, Any], max_bytes: int = 2**50, context: int = 128) -> RunConfig:
    return parse_config(
        {
            "rollout": ROLLOUT | rollout,
            "queue": {"max_bytes": max_bytes},
            "engine": {"max_context_tokens": context},
        }
    )


def test_a_group_weighs_its_tokens_and_the_heads_of_those_that_can_be_sampled() -> None:
    config = config_of({})
    bare = group_bytes(config)
    assert bare == 8 * 128 * 8 + 8192
    assert group_bytes(config, 3) == bare + 8 * (2 * 50) * 3 * BYTES_PER_HEAD_TOKEN
    full = config_of({"max_turn_tokens": 500})  # no more than the context can be sampled
    assert group_bytes(full, 3) == bare + 8 * 128 * 3 * BYTES_PER_HEAD_TOKEN


def test_without_heads_nothing_is_refused() -> None:
    assert heads_fit(config_of({}, max_bytes=1), 0) is None


def test_the_queue_must_hold_every_group_that_the_lag_bound_admits() -> None:
    needed = queue_groups(config_of({})) * group_bytes(config_of({}), 128)
    assert heads_fit(config_of({}, max_bytes=needed), 128) is None
    problem = heads_fit(config_of({}, max_bytes=needed - 1), 128)
    assert problem is not None
    assert problem.startswith("queue.max_bytes")
    assert str(needed) in problem


@pytest.mark.parametrize(("head_tokens", "accepted"), [(1022, True), (1023, False)])
def test_a_group_must_fit_the_codec(head_tokens: int, accepted: bool) -> None:
    config = config_of({"group_size": 32, "max_turn_tokens": 128}, context=256)
    assert (group_bytes(config, head_tokens) <= MAX_GROUP_BYTES) == accepted
    problem = heads_fit(config, head_tokens)
    assert (problem is None) == accepted
    assert accepted or "rollout.group_size" in str(problem)
