"""Heads are refused before a run starts where codec or queue could not hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.trajectory.frame import MAX_GROUP_BYTES
from actors.trajectory.head import BYTES_PER_HEAD_TOKEN
from cluster import assembly
from cluster.checks import check_config
from cluster.config import RunConfig, parse_config
from cluster.derived import group_bytes, queue_groups
from cluster.head_checks import heads_fit
from cluster.plan import describe_plan
from correction.errors import ConfigError

SCORE_CENTERING = {"recipe": "score_centering"}
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
    assert accepted or "surrogate.head" in str(problem)


@pytest.mark.parametrize(("recipe", "head_tokens"), [("score_centering", 48), ("gspo", 0)])
def test_the_recipe_decides_what_engines_are_asked_for_and_the_queue_takes_in(
    recipe: str, head_tokens: int
) -> None:
    overrides = {"surrogate.head": 48} if head_tokens else {}
    config = parse_config({"correction": {"recipe": recipe, "overrides": overrides}})
    settings = assembly.actor_settings(config, "run", Path("model"), "actor-0.0", seed=1)
    assert settings.engine.head_tokens == head_tokens
    assert assembly.queue_policy(config, "run").head_tokens == head_tokens


def test_a_configuration_whose_queue_cannot_hold_the_heads_is_refused() -> None:
    config = {"correction": SCORE_CENTERING, "queue": {"max_bytes": 2**24}}
    with pytest.raises(ConfigError, match=r"queue\.max_bytes = 16777216.*heads of 128"):
        check_config(parse_config(config))
    check_config(parse_config(config | {"queue": {"max_bytes": 2**26}}))
    check_config(parse_config({"queue": {"max_bytes": 2**24}}))


def test_the_plan_says_what_heads_weigh_and_only_where_there_are_some() -> None:
    plan = describe_plan(parse_config({"correction": SCORE_CENTERING}))
    assert "128 likeliest tokens" in plan
    assert "MiB" in plan
    assert "likeliest" not in describe_plan(RunConfig())
