"""Rules between fields: each at its boundary, and all problems together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.admission import LagBudget, capacity
from cluster.checks import LATE_RULES, RULES, check_config, check_resources
from cluster.config import RunConfig, parse_config
from cluster.derived import queue_groups
from cluster.plan import describe_plan
from correction.errors import ConfigError
from learner.schedule import most_versions


def config_of(changes: dict[str, Any]) -> RunConfig:
    """From dotted keys."""
    values: dict[str, Any] = {}
    for key, value in changes.items():
        table, _, name = key.partition(".")
        values.setdefault(table, {})[name] = value
    return parse_config(values)


def problems_of(changes: dict[str, Any]) -> list[str]:
    try:
        check_config(config_of(changes))
    except ConfigError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return []


ON_POLICY_REINFORCE = {
    "correction.recipe": "reinforce",
    "lag.max_lag_versions": 0,
    "rollout.group_size": 1,
}
BOUNDARIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # (key that the problem names first, refused, accepted just on the other side)
    (
        "learner.max_reuse",
        {"learner.max_reuse": 4, "lag.max_lag_versions": 2},
        {"learner.max_reuse": 3, "lag.max_lag_versions": 2},
    ),
    (
        "broadcast.every_versions",
        {"broadcast.every_versions": 4, "lag.max_lag_versions": 2},
        {"broadcast.every_versions": 3, "lag.max_lag_versions": 2},
    ),
    (
        "broadcast.every_versions",
        {"broadcast.every_versions": 3, "lag.max_lag_versions": 2, "learner.max_reuse": 2},
        {"broadcast.every_versions": 2, "lag.max_lag_versions": 2, "learner.max_reuse": 2},
    ),
    (
        "queue.max_groups",
        {"queue.max_groups": 11, "learner.groups_per_step": 4, "lag.max_lag_versions": 2},
        {"queue.max_groups": 12, "learner.groups_per_step": 4, "lag.max_lag_versions": 2},
    ),
    ("queue.max_bytes", {"queue.max_bytes": 10_000}, {"queue.max_bytes": 10_000_000}),
    (
        "engine.max_context_tokens",
        {"rollout.max_turns": 4, "rollout.max_turn_tokens": 32},
        {"rollout.max_turns": 4, "rollout.max_turn_tokens": 31},
    ),
    (
        "learner.micro_batch_tokens",
        {"learner.micro_batch_tokens": 127},
        {"learner.micro_batch_tokens": 128},
    ),
    (
        "rollout.environment_deadline_s",
        {"rollout.environment_deadline_s": 61},
        {"rollout.environment_deadline_s": 60},
    ),
    ("engine.swap_deadline_s", {"engine.swap_deadline_s": 31}, {"engine.swap_deadline_s": 30}),
    ("run.stall_timeout_s", {"run.stall_timeout_s": 60}, {"run.stall_timeout_s": 60.5}),
    (
        "run.stall_timeout_s",
        {"run.stall_timeout_s": 70, "broadcast.engine_deadline_s": 70},
        {"run.stall_timeout_s": 71, "broadcast.engine_deadline_s": 70},
    ),
    ("queue.lease_s", {"queue.lease_s": 120}, {"queue.lease_s": 121}),
    (
        "learner.ranks",
        {"learner.ranks": 5, "learner.groups_per_step": 2},
        {"learner.ranks": 4, "learner.groups_per_step": 2},
    ),
    (
        "learner.zero_stage",
        {"learner.zero_stage": 0, "model.dtype": "bfloat16"},
        {"learner.zero_stage": 0, "model.dtype": "float32"},
    ),
    ("learner.warmup_steps", {"learner.warmup_steps": 101}, {"learner.warmup_steps": 100}),
    (
        "engine.enforce_eager",
        {"engine.enforce_eager": False},
        {"engine.enforce_eager": False, "actors.num_gpus": 1},
    ),
    (
        "engine.kv_cache_bytes",
        {"engine.kv_cache_bytes": 0},
        {"engine.kv_cache_bytes": 0, "actors.num_gpus": 1},
    ),
    (
        "engine.tensor_parallel_size",
        {"engine.tensor_parallel_size": 2, "actors.num_gpus": 1},
        {"engine.tensor_parallel_size": 2, "actors.num_gpus": 2},
    ),
    (
        "correction.overrides.allow_no_correction",
        {"correction.overrides": {"allow_no_correction": True}},
        {"correction.none": True},
    ),
    (
        "correction.recipe",
        {"correction.recipe": "reinforce", "lag.max_lag_versions": 1},
        {"correction.recipe": "reinforce", "lag.max_lag_versions": 0},
    ),
    (
        "correction.recipe",
        {"correction.recipe": "reinforce"},
        {"correction.recipe": "reinforce", "correction.none": True},
    ),
    (
        "correction.recipe",
        {"correction.recipe": "decoupled_pop"},
        {"correction.recipe": "decoupled_ppo"},
    ),
    (
        "correction.advantage",
        {"rollout.group_size": 1},
        {"rollout.group_size": 2},
    ),
    (
        "correction.group_filter",
        {**ON_POLICY_REINFORCE, "correction.overrides": {"group_filter": "mixed_rewards"}},
        {**ON_POLICY_REINFORCE, "correction.overrides": {"group_filter": "none"}},
    ),
    ("model.path", {"model.path": "no/such/folder"}, {"model.path": "starter"}),
    ("environment.name", {"environment.name": "calculatr"}, {"environment.name": "calculator"}),
]


@pytest.mark.parametrize(("key", "refused", "accepted"), BOUNDARIES)
def test_each_rule_holds_at_its_boundary(
    key: str, refused: dict[str, Any], accepted: dict[str, Any]
) -> None:
    problems = problems_of(refused)
    assert len(problems) == 1
    assert problems[0].startswith(key)
    assert problems_of(accepted) == []


def test_the_defaults_can_run() -> None:
    check_config(RunConfig())


def test_every_rule_is_tried_at_its_boundary() -> None:
    refused = [config_of(changes) for _, changes, _ in BOUNDARIES]
    assert [rule for rule in (*RULES, *LATE_RULES) if not any(map(rule, refused))] == []


def test_all_problems_are_reported_together() -> None:
    changes = {"learner.max_reuse": 9, "queue.lease_s": 1, "engine.kv_cache_bytes": 0}
    problems = problems_of(changes)
    keys = [problem.partition(" ")[0] for problem in problems]
    assert keys == [
        "learner.max_reuse",
        "queue.lease_s",
        "engine.kv_cache_bytes",
    ]


def test_a_problem_names_the_values_and_the_way_out() -> None:
    (problem,) = problems_of({"correction.recipe": "reinforce"})
    assert "lag.max_lag_versions = 4" in problem
    assert "correction.none = true" in problem


@pytest.mark.parametrize(
    ("lag", "reuse"), [(lag, reuse) for lag in range(6) for reuse in range(1, lag + 2)]
)
def test_the_derived_queue_holds_exactly_what_admission_can_admit(lag: int, reuse: int) -> None:
    config = config_of(
        {"lag.max_lag_versions": lag, "learner.max_reuse": reuse, "learner.groups_per_step": 3}
    )
    budget = LagBudget(max_lag_versions=lag, groups_per_step=3, steps_per_batch=reuse)
    assert queue_groups(config) == capacity(budget, 0, {}, 0)
    assert most_versions(lag, reuse) == lag - reuse + 2


@pytest.mark.parametrize(
    ("changes", "resources", "words"),
    [
        ({}, {"CPU": 1.0}, ["1.5 CPUs", "actors.num_cpus = 0.5", "learner.num_cpus = 1", "has 1"]),
        ({"actors.num_gpus": 1}, {"CPU": 64.0}, ["1 GPUs", "actors.num_gpus = 1", "has 0"]),
        (
            {"actors.count": 6, "actors.num_gpus": 1, "learner.ranks": 4, "learner.num_gpus": 1},
            {"CPU": 64.0, "GPU": 8.0},
            ["10 GPUs", "actors.count = 6", "learner.ranks = 4", "has 8"],
        ),
    ],
)
def test_a_cluster_that_is_too_small_is_refused(
    changes: dict[str, Any], resources: dict[str, float], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_resources(config_of(changes), resources)
    for word in words:
        assert word in str(caught.value)


def test_a_cluster_that_is_just_large_enough_is_accepted() -> None:
    check_resources(RunConfig(), {"CPU": 1.5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction.recipe": "ppo", "critic.path": "nowhere"}, "critic.path: only for kind"),
        (
            {"correction.recipe": "ppo", "critic.kind": "model", "critic.path": "no/where"},
            "critic.path: 'no/where' is neither a folder",
        ),
        (
            {"correction.recipe": "ppo", "critic.kind": "model", "critic.detach_trunk": True},
            "critic.detach_trunk: only for kind",
        ),
        ({"correction.recipe": "grpo", "reference.path": "no/where"}, "reference.path: 'no/where'"),
        (
            {"correction.recipe": "instructgpt", "pretraining.path": "no.csv"},
            "pretraining.path: must end in",
        ),
        (
            {"correction.recipe": "instructgpt", "pretraining.path": "no.txt"},
            "pretraining.path = 'no.txt': there is no such file",
        ),
        (
            {
                "correction.recipe": "dapo",
                "correction.overrides": {"shaping.overlong_penalty.max_tokens": 20480},
            },
            "a trajectory has at most 96 sampled tokens",
        ),
        ({"correction.recipe": "srpo"}, "needs scores of a teacher"),
        ({"correction.recipe": "arpo"}, "needs rollouts that branch"),
        ({"correction.recipe": "dagger"}, "needs tokens of an expert"),
    ],
)
def test_what_a_recipe_needs_is_looked_for_before_the_start(
    changes: dict[str, Any], message: str
) -> None:
    (problem,) = problems_of(changes)
    assert message in problem


def test_text_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text", encoding="utf-8")
    changes = {
        "correction.recipe": "instructgpt",
        "pretraining.path": str(text),
        "pretraining.tokens_per_step": 1536,
        "learner.ranks": 2,
    }
    (problem,) = problems_of(changes)
    assert "makes 3 blocks of 512 tokens, which 2 learner ranks cannot share" in problem
    assert problems_of(changes | {"pretraining.tokens_per_step": 1024}) == []


def test_check_says_which_tables_the_recipe_does_not_look_at() -> None:
    filled = {"critic": {"learning_rate": 1e-4}}
    assert "[critic] is not looked at: the recipe needs no values" in describe_plan(
        parse_config(filled)
    )
    needed = {**filled, "correction": {"recipe": "ppo"}}
    assert "not looked at" not in describe_plan(parse_config(needed))
