import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.observing import distributions
from cluster.observing.accounts import ActorAccount, LearnerClock
from cluster.observing.distributions import Quantiles
from cluster.observing.summary import SummaryBuilder
from tests.cluster.made_events import (
    make_actor,
    make_broadcast,
    make_evaluation,
    make_ledger,
    make_queue,
    make_step,
)

ESS = {"ess_ratio_token_raw": 0.5, "ess_ratio_token_bounded": 1.0}


def build(builder: SummaryBuilder) -> dict[str, object]:
    return builder.build(status="done", reason="step limit", wall_s=100.0)


def section(builder: SummaryBuilder, name: str) -> dict[str, object]:
    found = build(builder)[name]
    assert isinstance(found, dict)
    return found


def test_a_whole_run_against_numbers_computed_by_hand() -> None:
    builder = SummaryBuilder(seed=7)
    first = make_step(
        1,
        at_s=12.0,
        reward=0.2,
        metrics=ESS,
        lag_tokens={0: 30, 1: 10},
        lag_trajectories={0: 3, 1: 1},
    )
    second = make_step(
        2,
        at_s=20.0,
        wait_s=3.0,
        step_s=2.0,
        reward=0.8,
        action_tokens=80,
        metrics={"ess_ratio_token_raw": 0.8},
        lag_tokens={1: 10, 4: 70},
        lag_trajectories={4: 4},
    )
    builder.on_step(first)
    builder.on_step(second)
    builder.on_broadcast(make_broadcast("a", version=1, phases_s={"gather": 0.5, "load": 0.1},
                                        stall_s=0.2, size_bytes=100))  # fmt: skip
    builder.on_broadcast(
        make_broadcast("b", version=1, phases_s={"load": 0.3}, stall_s=0.4, size_bytes=100)
    )
    builder.on_broadcast(make_broadcast("a", version=2, outcome="skipped", size_bytes=9))
    builder.on_broadcast(make_broadcast("b", version=2, outcome="deadline"))
    builder.on_actors({"a": make_actor("a", idle_s=2.0, alive_s=8.0)})
    builder.on_queue(
        make_queue(make_ledger(8, {"lag": 2}, queued=1), make_ledger(120, {"lag": 30}, leased=4))
    )
    builder.on_evaluation(make_evaluation(2, success=0.75))

    assert json.loads(json.dumps(build(builder))) == {
        "status": "done",
        "reason": "step limit",
        "first_cause": None,
        "seed": 7,
        "steps": 2,
        "refused_steps": 0,
        "policy_version": 2,
        "epoch": 0,
        "wall_s": 100.0,
        "reward": {"first": 0.2, "last": 0.8, "best": 0.8},
        "trajectories": {"issued": 11, "trained": 8, "dropped": {"lag": 2}, "open": 1},
        "tokens": {"generated": 154, "trained": 120, "dropped": {"lag": 30}, "open": 4},
        "received": {"bytes": 40_000, "head_bytes": 30_000},
        "groups": {"filtered_tokens_ratio": 0.0, "kept": {}, "filtered": {}},
        "policy_lag": {
            "mean": 2.5,  # (10 + 10 + 280) / 120
            "p95": 4,
            "max": 4,
            "histogram": {"0": 30, "1": 20, "4": 70},
            "per_trajectory": {
                "mean": 2.125,  # (1 + 16) / 8
                "p95": 4,
                "max": 4,
                "histogram": {"0": 3, "1": 1, "4": 4},
            },
        },
        "reuse": {"mean": 1.0, "max": 1},
        "broadcast": {
            "count": 2,
            "swapped": 2,
            "skipped": 1,
            "deadline": 1,
            "failed": 0,
            "bytes": 200,
            "phases_s": {
                "gather": {"p50": 0.5, "p95": 0.5},
                "load": {"p50": 0.1, "p95": 0.3},
            },
            "stall_s": {"p50": 0.2, "p95": 0.4, "max": 0.4},
        },
        "ess_ratio": {"raw": pytest.approx(0.7), "bounded": 1.0},  # (40 * .5 + 80 * .8) / 120
        "idle": {"learner": 0.4, "actors": 0.25},
        "evaluation": [
            {
                "policy_version": 2,
                "epoch": 0,
                "tasks": 64,
                "success": 0.75,
                "low": 0.65,
                "high": 0.85,
                "temperature": 1.0,
                "seconds": 3.5,
                "failed": 0,
            }
        ],
    }


def test_an_empty_run_has_the_whole_contract_and_no_invented_zero() -> None:
    summary = build(SummaryBuilder(seed=1))
    assert summary.keys() == build(_busy()).keys()
    assert summary["steps"] == 0
    assert summary["reward"] == {"first": None, "last": None, "best": None}
    assert summary["received"] == {"bytes": None, "head_bytes": None}
    assert summary["groups"] == {"filtered_tokens_ratio": None, "kept": {}, "filtered": {}}
    lag = summary["policy_lag"]
    assert isinstance(lag, dict)
    assert (lag["mean"], lag["max"], lag["histogram"]) == (None, None, {})
    assert summary["idle"] == {"learner": None, "actors": None}
    json.dumps(summary, allow_nan=False)


def _busy() -> SummaryBuilder:
    builder = SummaryBuilder(seed=1)
    builder.on_step(make_step(1))
    return builder


def test_the_documentation_names_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "run_directory.md").read_text(encoding="utf-8")
    for name, content in build(_busy()).items():
        for field in (name, *(content if isinstance(content, dict) else ())):
            assert f"`{field}`" in text, field


def test_a_failed_run_names_its_first_cause_and_what_is_open() -> None:
    builder = _busy()
    builder.on_queue(make_queue(make_ledger(4, in_flight=12)))
    summary = builder.build(
        status="failed", reason="error", wall_s=3.0, first_cause="EngineError: actor-1 died"
    )
    assert (summary["status"], summary["first_cause"]) == ("failed", "EngineError: actor-1 died")
    trajectories = summary["trajectories"]
    assert isinstance(trajectories, dict)
    assert trajectories["open"] == 12


def test_refused_steps_count_for_nothing_but_their_number() -> None:
    builder = SummaryBuilder(seed=1)
    builder.on_step(make_step(0, applied=False, reward=9.0, lag_tokens={7: 7}))
    builder.on_step(make_step(1, reward=0.5, lag_tokens={1: 1}))
    summary = build(builder)
    assert (summary["steps"], summary["refused_steps"]) == (1, 1)
    assert section(builder, "reward")["best"] == 0.5
    assert section(builder, "policy_lag")["max"] == 1
    assert section(builder, "reuse") == {"mean": 0.5, "max": 1}


def test_reuse_counts_passes_of_batches_also_of_those_cut_short() -> None:
    builder = SummaryBuilder(seed=1)
    for number, reuse_pass in enumerate((1, 2, 3, 1, 1), start=1):
        builder.on_step(make_step(number, reuse_pass=reuse_pass, passes=3, trajectories=4))
    # batches of 3, 1 and (still in work) 1 passes
    assert section(builder, "reuse") == {"mean": pytest.approx(5 / 3), "max": 3}


def test_reward_is_pooled_over_trajectories_not_a_mean_of_means() -> None:
    builder = SummaryBuilder(seed=1)
    rewards = [(0.0, 1), (1.0, 3)] + [(0.5, 4)] * 16 + [(1.0, 2), (0.0, 6)]
    for number, (reward, trajectories) in enumerate(rewards, start=1):
        builder.on_step(make_step(number, reward=reward, trajectories=trajectories))
    # 20 steps: windows of 2; best is steps 18 and 19: (2 + 2) / 6, less than the first window
    assert section(builder, "reward") == {"first": 0.75, "last": 0.25, "best": 0.75}


steps = st.tuples(
    st.integers(1, 6),
    st.dictionaries(st.integers(0, 12), st.integers(0, 40), max_size=5),
    st.floats(-1, 1).map(lambda x: round(x, 3)),
)


@given(st.lists(steps, min_size=1, max_size=40))
def test_lag_and_reward_equal_brute_force_lists(
    rows: list[tuple[int, dict[int, int], float]],
) -> None:
    builder = SummaryBuilder(seed=1)
    tokens: list[int] = []
    for number, (trajectories, lag_tokens, reward) in enumerate(rows, start=1):
        builder.on_step(
            make_step(number, reward=reward, trajectories=trajectories, lag_tokens=lag_tokens)
        )
        tokens += [lag for lag, count in lag_tokens.items() for _ in range(count)]
    lag = section(builder, "policy_lag")
    if tokens:
        assert lag["mean"] == pytest.approx(sum(tokens) / len(tokens))
        assert lag["max"] == max(tokens)
        assert lag["p95"] == brute_percentile(tokens, 95)
    else:
        assert (lag["mean"], lag["max"], lag["p95"]) == (None, None, None)
    width = math.ceil(len(rows) / 10)
    windows = [
        [row[2] for row in rows[start : start + width] for _ in range(row[0])]
        for start in range(len(rows) - width + 1)
    ]
    means = [sum(window) / len(window) for window in windows]
    assert section(builder, "reward") == {
        "first": pytest.approx(means[0], abs=1e-9),
        "last": pytest.approx(means[-1], abs=1e-9),
        "best": pytest.approx(max(means), abs=1e-9),
    }


def brute_percentile(values: list[int], percent: int) -> int:
    return next(
        value
        for value in sorted(values)
        if sum(other <= value for other in values) * 100 >= percent * len(values)
    )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200), st.integers(1, 100))
def test_both_percentiles_equal_the_definition(values: list[int], percent: int) -> None:
    expected = brute_percentile(values, percent)
    histogram = distributions.pool({value: 1} for value in values)
    kept = Quantiles()
    for value in values:
        kept.add(float(value))
    assert distributions.percentile(histogram, percent) == expected
    assert kept.percentile(percent) == expected


def test_a_full_reservoir_stays_fair_and_bounded() -> None:
    kept = Quantiles(limit=500, seed=3)
    values = [float(value) for value in range(20_000)]
    random.Random(3).shuffle(values)
    for value in values:
        kept.add(value)
    middle = kept.percentile(50)
    assert middle is not None
    # the median of 500 draws of a uniform has a standard deviation of 0.022 of the range
    assert abs(middle / 20_000 - 0.5) < 0.1
    assert kept.largest == 19_999
    assert kept.count == 20_000


readings = st.lists(
    st.dictionaries(
        st.sampled_from("abc"),
        st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 3)),
        max_size=3,
    ),
    max_size=20,
)


@given(readings)
def test_fleet_totals_never_fall_whatever_the_readings(
    fleet: list[dict[str, tuple[int, int, int]]],
) -> None:
    account = ActorAccount()
    before = account.totals
    for reading in fleet:
        now = account.update(
            {
                name: make_actor(
                    name, generated_tokens=tokens, alive_s=float(alive), restarts=restarts
                )
                for name, (tokens, alive, restarts) in reading.items()
            }
        )
        assert now.generated_tokens >= before.generated_tokens
        assert now.alive_s >= before.alive_s
        assert now.restarts >= before.restarts
        before = now


def test_a_short_absence_is_not_a_restart() -> None:
    account = ActorAccount()
    account.update({"a": make_actor("a", generated_tokens=100, alive_s=10.0)})
    account.update({})
    account.update({"a": make_actor("a", generated_tokens=120, alive_s=12.0)})
    assert account.totals.generated_tokens == 120
    account.update({"a": make_actor("a", generated_tokens=150, alive_s=13.0, restarts=1)})
    assert account.totals.generated_tokens == 270
    assert account.totals.restarts == 1


def test_learner_idle_share_is_at_most_one_even_if_the_clock_jumps_back() -> None:
    clock = LearnerClock()
    clock.on_step(make_step(1, at_s=50.0, wait_s=5.0, step_s=1.0))
    clock.on_step(make_step(2, at_s=1.0, wait_s=5.0, step_s=1.0))
    assert clock.idle_share == pytest.approx(10 / 12)
