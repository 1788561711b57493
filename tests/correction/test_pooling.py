"""Sums and metrics against their definitions, per bucket of lag and over any split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from correction.composition import Recipe
from correction.objective import add_sums, summarise
from correction.pooling import BUCKET_ENDS_VERSIONS, LAG_BUCKETS, MAX_PREFIX
from correction.recipes import resolve
from tests.correction.micro_batches import (
    EVERY_RECIPE,
    MicroBatch,
    denominators_of,
    make_batch,
    objective_of,
)

DECOUPLED = resolve("decoupled_ppo", {"weight.high": 1.3}, max_lag_versions=20, group_size=2)
BAND = resolve(
    "decoupled_ppo",
    {"weight": {"bound": "band", "low": 0.7, "high": 1.3}},
    max_lag_versions=20,
    group_size=2,
)


def bucket_of(lag: int) -> str:
    for label, end in zip(LAG_BUCKETS, BUCKET_ENDS_VERSIONS, strict=False):
        if lag <= end:
            return label
    return LAG_BUCKETS[-1]


def metrics_of(recipe: Recipe, batch: MicroBatch) -> dict[str, float]:
    sums = objective_of(recipe, batch).sums
    return summarise({key: value.item() for key, value in sums.items()})


def tokens_of(batch: MicroBatch, label: str | None) -> Iterator[tuple[int, int]]:
    for row, column in batch.mask.nonzero().tolist():
        if label is None or bucket_of(int(batch.lag[row, column])) == label:
            yield row, column


def rows_of(batch: MicroBatch, label: str | None) -> Iterator[int]:
    for row in range(len(batch.mask)):
        lags = batch.lag[row][batch.mask[row]].tolist()
        if lags and (label is None or bucket_of(max(lags)) == label):
            yield row


def ess_ratio(weights: list[float]) -> float:
    squares = math.fsum(w * w for w in weights)
    return math.fsum(weights) ** 2 / squares / len(weights) if squares else 0.0


@pytest.mark.parametrize(("lag", "label"), [(0, "0"), (1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"),
                         (5, "5-8"), (8, "5-8"), (9, "9+"), (10**9, "9+")])  # fmt: skip
def test_buckets_of_lag(lag: int, label: str) -> None:
    batch = make_batch(0, rows=1, columns=1)
    batch.lag.fill_(lag)
    metrics = metrics_of(DECOUPLED, batch)
    assert metrics[f"tokens@lag={label}"] == 1.0
    assert [key for key in metrics if key.startswith("tokens@")] == [f"tokens@lag={label}"]
    assert metrics["policy_lag_max"] == metrics["policy_lag_mean"] == lag


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), label=st.sampled_from([None, *LAG_BUCKETS]))
def test_token_metrics_equal_their_definition(seed: int, label: str | None) -> None:
    batch = make_batch(seed, rows=5, columns=8)
    places = list(tokens_of(batch, label))
    metrics, end = metrics_of(DECOUPLED, batch), "" if label is None else f"@lag={label}"
    if not places:
        assert not [key for key in metrics if end and key.endswith(end)]
        return
    away = [float(batch.proximal[p] - batch.behaviour[p]) for p in places]
    update = [float(batch.target[p] - batch.proximal[p]) for p in places]
    count = len(places)
    expected = {
        "tokens": count,
        "policy_lag_mean": sum(int(batch.lag[p]) for p in places) / count,
        "policy_lag_max": max(int(batch.lag[p]) for p in places),
        "weight_mean_raw": math.fsum(map(math.exp, away)) / count,
        "weight_mean_bounded": math.fsum(min(math.exp(x), 1.3) for x in away) / count,
        "weight_changed_fraction": sum(math.exp(x) > 1.3 for x in away) / count,
        "rejected_fraction": 0.0,
        "m2": math.fsum(x * x for x in away) / count,
        "chi2_token": math.fsum(math.exp(2 * x) for x in away) / count - 1,
        "log_ratio_abs_max": max(map(abs, away)),
        "log_ratio_update_abs_max": max(map(abs, update)),
        "kl_k1_mu_learner": -math.fsum(away) / count,
        "kl_k3_mu_learner": math.fsum(math.exp(x) - 1 - x for x in away) / count,
        "kl_k1_prox_theta": -math.fsum(update) / count,
        "kl_k3_prox_theta": math.fsum(math.exp(x) - 1 - x for x in update) / count,
        "ess_ratio_token_raw": ess_ratio([math.exp(x) for x in away]),
        "ess_ratio_token_bounded": ess_ratio([min(math.exp(x), 1.3) for x in away]),
    }
    for name, value in expected.items():
        assert metrics[name + end] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), label=st.sampled_from([None, *LAG_BUCKETS]))
def test_trajectory_metrics_equal_their_definition(seed: int, label: str | None) -> None:
    batch = make_batch(seed, rows=6, columns=5)
    rows = list(rows_of(batch, label))
    metrics, end = metrics_of(BAND, batch), "" if label is None else f"@lag={label}"
    if not rows:
        assert f"ess_ratio_trajectory_raw{end}" not in metrics
        return
    raw, bounded = [], []
    for row in rows:
        logs = (batch.proximal - batch.behaviour)[row][batch.mask[row]].tolist()
        raw.append(math.exp(math.fsum(logs)))
        kept = [math.exp(x) if 0.7 <= math.exp(x) <= 1.3 else 0.0 for x in logs]
        bounded.append(math.prod(kept))
    wanted_chi2 = math.fsum(w * w for w in raw) / len(raw) - 1
    assert metrics[f"ess_ratio_trajectory_raw{end}"] == pytest.approx(ess_ratio(raw))
    assert metrics[f"ess_ratio_trajectory_bounded{end}"] == pytest.approx(ess_ratio(bounded))
    assert metrics[f"chi2_trajectory{end}"] == pytest.approx(wanted_chi2, rel=1e-9, abs=1e-9)
    if label is None:
        assert metrics["trajectories"] == len(rows)


@pytest.mark.parametrize("level", ["turn_product", "turn_geometric", "sequence_product"])
def test_a_unit_counts_once_in_the_weight_of_its_trajectory(level: str) -> None:
    overrides = {"weight.level": level, "weight.bound": "none"}
    recipe = resolve("decoupled_ppo", overrides, max_lag_versions=20, group_size=2)
    batch = make_batch(7, rows=3, columns=5, density=1.1)
    batch.turns[:] = torch.tensor([0, 0, 1, 1, 1])
    logs = batch.proximal - batch.behaviour
    units = [(row[:2].sum(), row[2:].sum()) for row in logs]
    if level == "turn_geometric":
        units = [(first / 2, last / 3) for first, last in units]
    weights = [math.exp(float(first + last)) for first, last in units]
    metrics = metrics_of(recipe, batch)
    assert metrics["ess_ratio_trajectory_bounded"] == pytest.approx(ess_ratio(weights))


def test_engine_mismatch_is_told_apart_from_lag() -> None:
    """Lag 0 differs by 0.01 (the engine), lag 2 by 0.5 (the policy)."""
    batch = make_batch(1, rows=2, columns=4, density=1.1)
    batch.lag[:] = torch.tensor([[0], [2]])
    gap = torch.tensor([[0.01], [0.5]], dtype=torch.float64).expand(2, 4)
    shifted = replace(batch, proximal=batch.behaviour - gap)
    metrics = metrics_of(DECOUPLED, shifted)
    assert metrics["mismatch_tokens"] == metrics["lagged_tokens"] == 4.0
    assert metrics["mismatch_kl_k1"] == pytest.approx(0.01)
    assert metrics["lagged_kl_k1"] == pytest.approx(0.5)
    assert metrics["mismatch_kl_k3"] == pytest.approx(math.exp(-0.01) - 1 + 0.01)
    assert metrics["mismatch_log_ratio_abs_max"] == pytest.approx(0.01)
    assert metrics["kl_k1_mu_learner"] == pytest.approx(0.255)


def test_bypass_measures_the_target_policy_against_the_behaviour() -> None:
    recipe = resolve("ppo_bypass", {}, max_lag_versions=4, group_size=2)
    batch = make_batch(1)
    metrics = metrics_of(recipe, batch)
    away = (batch.target - batch.behaviour)[batch.mask]
    assert metrics["kl_k1_mu_learner"] == pytest.approx(-float(away.mean()))
    assert metrics["kl_k1_prox_theta"] == pytest.approx(-float(away.mean()))
    assert metrics["ess_ratio_token_bounded"] == 1.0


def test_a_log_linear_anchor_is_weighed_by_but_measured_against_the_behaviour() -> None:
    """prox/mu is nearer to 1 by construction: engine mismatch would read 0 at lag 0."""
    batch = make_batch(1)
    recipes = [resolve(n, {}, max_lag_versions=4, group_size=2) for n in ("a3po", "ppo_bypass")]
    anchored, bypass = (metrics_of(recipe, batch) for recipe in recipes)
    for name in ("mismatch_kl_k3", "kl_k1_mu_learner", "ess_ratio_trajectory_raw", "m2"):
        assert anchored[name] == pytest.approx(bypass[name]), name
    assert anchored["ess_ratio_token_bounded"] < 1.0


@pytest.mark.parametrize("recipe", EVERY_RECIPE[:5], ids=lambda recipe: recipe.name)
def test_metrics_are_pooled_and_not_a_mean_of_means(recipe: Recipe) -> None:
    batch = make_batch(9, rows=4, columns=6)
    whole = denominators_of(batch)
    parts = [objective_of(recipe, batch.rows(rows), whole).sums for rows in ([0], [1, 2, 3])]
    plain = [{key: value.item() for key, value in part.items()} for part in parts]

    pooled = summarise(add_sums(*plain))

    everything = metrics_of(recipe, batch)
    assert pooled.keys() == everything.keys()
    for name, value in everything.items():
        assert pooled[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name
    if recipe.name == "decoupled_ppo":
        means = [summarise(part)["ess_ratio_token_raw"] for part in plain]
        assert pooled["ess_ratio_token_raw"] != pytest.approx(sum(means) / 2, rel=1e-6)


def test_add_sums_takes_the_larger_of_maxima_for_floats_and_tensors() -> None:
    left = {"tokens": 1.0, f"{MAX_PREFIX}x": 3.0, "only_left": 5.0}
    right = {"tokens": 2.0, f"{MAX_PREFIX}x": 2.0, "only_right": 7.0}
    wanted = {"tokens": 3.0, f"{MAX_PREFIX}x": 3.0, "only_left": 5.0, "only_right": 7.0}
    assert add_sums(left, right) == add_sums(right, left) == wanted
    tensors = [{k: torch.tensor(v) for k, v in side.items()} for side in (left, right)]
    assert {k: v.item() for k, v in add_sums(*tensors).items()} == wanted


def test_sums_are_detached_float64_scalars() -> None:
    batch = make_batch(0).to(torch.float32)
    target = batch.target.clone().requires_grad_()
    for key, value in objective_of(DECOUPLED, batch, target=target).sums.items():
        assert value.dtype == torch.float64, key
        assert value.shape == (), key
        assert not value.requires_grad, key
