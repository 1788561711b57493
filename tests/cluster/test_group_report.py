"""Filtered against kept groups, as metrics, in the summary and in words."""

from __future__ import annotations

import json

from actors.trajectory.account import GroupCosts
from cluster.observing.group_report import (
    METRICS,
    counters,
    filtered_tokens_ratio,
    group_summary,
    reward_means,
    told_filtering,
)
from cluster.observing.summary import SummaryBuilder
from cluster.supervisor import stall_cause
from tests.cluster.made_events import make_ledger, make_queue

STATS = make_queue(
    tokens=make_ledger(trained=300, dropped={"filtered": 100}, queued=100),
    kept={"mixed": GroupCosts(2, 8, 1, 400, 4.0, 20.0, 5.0)},
    filtered={
        "all_worst": GroupCosts(2, 8, 2, 80, 0.0, 6.0, 1.0),
        "all_best": GroupCosts(1, 4, 0, 20, 4.0, 2.0, 0.5),
    },
)


def test_the_share_of_filtered_tokens_is_of_all_that_were_generated() -> None:
    assert filtered_tokens_ratio(STATS) == 100 / 500
    assert filtered_tokens_ratio(make_queue()) is None


def test_every_cost_of_either_fate_is_a_counter_of_the_catalogue() -> None:
    found = {(name, outcome): count for name, count, outcome in counters(STATS)}
    known = {metric.name: metric.known for metric in METRICS}
    assert all(outcome in known[name] for name, outcome in found)
    assert {name for name, _ in found} | {
        "lagwise_group_reward_mean",
        "lagwise_filtered_tokens_ratio",
    } == known.keys()
    assert found["lagwise_filtered_groups_total", "all_worst"] == 2
    assert found["lagwise_filtered_group_environment_seconds_total", "all_best"] == 0.5
    assert found["lagwise_kept_group_tokens_total", "mixed"] == 400
    assert "mixed" not in known["lagwise_filtered_groups_total"]
    assert reward_means(STATS) == {("kept",): 0.5, ("filtered",): 4 / 12}
    assert reward_means(make_queue()) == {}


def test_the_summary_sets_lengths_rewards_and_seconds_side_by_side() -> None:
    builder = SummaryBuilder(seed=1)
    builder.on_queue(STATS)
    made = builder.build(status="done", reason="max_steps", wall_s=1.0)["groups"]
    assert made == json.loads(json.dumps(group_summary(STATS), allow_nan=False))
    assert made == {
        "filtered_tokens_ratio": 0.2,
        "kept": {
            "mixed": {
                "groups": 2,
                "trajectories": 8,
                "truncated": 1,
                "tokens": 400,
                "tokens_mean": 50.0,
                "reward_mean": 0.5,
                "generation_s": 20.0,
                "environment_s": 5.0,
            }
        },
        "filtered": {
            "all_best": {
                "groups": 1,
                "trajectories": 4,
                "truncated": 0,
                "tokens": 20,
                "tokens_mean": 5.0,
                "reward_mean": 1.0,
                "generation_s": 2.0,
                "environment_s": 0.5,
            },
            "all_worst": {
                "groups": 2,
                "trajectories": 8,
                "truncated": 2,
                "tokens": 80,
                "tokens_mean": 10.0,
                "reward_mean": 0.0,
                "generation_s": 6.0,
                "environment_s": 1.0,
            },
        },
    }


def test_a_queue_that_was_never_read_has_no_invented_zero() -> None:
    assert group_summary(None) == {"filtered_tokens_ratio": None, "kept": {}, "filtered": {}}


def test_a_stall_says_what_was_filtered() -> None:
    said = "the group filter dropped 3 of 5 groups (1 all_best, 2 all_worst)"
    assert told_filtering(STATS) == said
    assert told_filtering(make_queue()) == ""
    assert stall_cause({"filtered": 12}, {}, said) == f"; dropped so far: 12 filtered; {said}"
