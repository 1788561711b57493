from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.errors import InputError
from correction.proximal import Proximal, loglinear_proximal, proximal_anchor
from correction.ratios import log_ratio
from tests.correction.micro_batches import MicroBatch, make_batch

any_seed = st.integers(0, 2**31)


def anchor_of(batch: MicroBatch) -> Tensor:
    return loglinear_proximal(batch.target, batch.behaviour, batch.lag, batch.mask)


def slow_anchor(theta: float, mu: float, lag: int) -> float:
    """From versions, as in the paper: theta's is 100."""
    v_theta, v_mu = 100, 100 - lag
    v_proximal = v_theta - 1
    alpha = (v_proximal - v_mu) / (v_theta - v_mu) if v_mu < v_theta else 0.0
    return mu + alpha * (theta - mu)


@settings(max_examples=60, deadline=None)
@given(seed=any_seed, spread=st.sampled_from([0.0, 0.3, 8.0]))
def test_it_is_its_slow_truth(seed: int, spread: float) -> None:
    batch = make_batch(seed, spread=spread)
    anchor = anchor_of(batch)
    for row, t in torch.cartesian_prod(torch.arange(4), torch.arange(6)).tolist():
        wanted = 0.0
        if batch.mask[row, t]:
            wanted = slow_anchor(
                float(batch.target[row, t]), float(batch.behaviour[row, t]), int(batch.lag[row, t])
            )
        assert float(anchor[row, t]) == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=any_seed)
def test_it_splits_the_ratio_into_one_part_in_n_and_the_rest(seed: int) -> None:
    batch = make_batch(seed)
    anchor, whole = anchor_of(batch), log_ratio(batch.target, batch.behaviour, batch.mask)
    lag = batch.lag.clamp(min=1).double()

    update = log_ratio(batch.target, anchor, batch.mask)
    away = log_ratio(anchor, batch.behaviour, batch.mask)

    torch.testing.assert_close(update, whole / lag, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(update + away, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_lag_and_at_a_lag_of_one_it_is_mu_to_the_bit(dtype: torch.dtype) -> None:
    for lag in (0, 1):
        batch = make_batch(5).to(dtype)
        batch = replace(batch, lag=torch.full_like(batch.lag, lag))
        anchor = anchor_of(batch)
        assert anchor.dtype == dtype
        assert torch.equal(anchor[batch.mask], batch.behaviour[batch.mask])


def test_equal_policies_have_their_own_logprobs_as_anchor() -> None:
    batch = make_batch(6)
    batch = replace(batch, target=batch.behaviour.clone())
    assert torch.equal(anchor_of(batch)[batch.mask], batch.behaviour[batch.mask])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
def test_garbage_at_masked_places_changes_no_bit(garbage: float) -> None:
    batch = make_batch(7)
    assert torch.equal(anchor_of(batch.with_garbage(garbage)), anchor_of(batch))
    assert not anchor_of(batch.with_garbage(garbage))[~batch.mask].any()


def test_sixteen_bits_are_widened() -> None:
    batch = make_batch(8).to(torch.bfloat16)
    assert anchor_of(batch).dtype == torch.float32


@pytest.mark.parametrize("proximal", Proximal)
def test_an_anchor_passes_no_gradient(proximal: Proximal) -> None:
    batch = make_batch(9)
    moving = batch.target.clone().requires_grad_()
    anchor = proximal_anchor(
        proximal,
        moving,
        moving,
        target_logprobs=moving,
        lag_versions=batch.lag,
        mask=batch.mask,
    )
    assert not anchor.requires_grad


def test_each_kind_looks_at_its_own_scores() -> None:
    batch = make_batch(10)
    extra = {
        "target_logprobs": batch.target,
        "lag_versions": batch.lag,
        "mask": batch.mask,
    }
    recomputed, behaviour = batch.proximal, batch.behaviour

    assert torch.equal(proximal_anchor(Proximal.RECOMPUTE, recomputed, behaviour), recomputed)
    assert torch.equal(proximal_anchor(Proximal.BEHAVIOUR, None, behaviour), behaviour)
    log_linear = proximal_anchor(Proximal.LOG_LINEAR, None, behaviour, **extra)
    assert torch.equal(log_linear, anchor_of(batch))


def test_missing_scores_are_refused() -> None:
    batch = make_batch(11)
    given_all: dict[str, Tensor | None] = {
        "target_logprobs": batch.target,
        "lag_versions": batch.lag,
        "mask": batch.mask,
    }
    for missing, named in (
        ("target_logprobs", "target_logprobs"),
        ("lag_versions", "lag_versions"),
        ("mask", "action_mask"),
    ):
        with pytest.raises(InputError, match=f"{named}: missing, proximal = log_linear needs it"):
            proximal_anchor(
                Proximal.LOG_LINEAR, None, batch.behaviour, **(given_all | {missing: None})
            )
    with pytest.raises(InputError, match="proximal_logprobs: this recipe needs"):
        proximal_anchor(Proximal.RECOMPUTE, None, batch.behaviour)


def broken(values: Tensor, number: float) -> Tensor:
    changed = values.clone()
    changed[0, 0] = number
    return changed


def test_bad_input_is_refused() -> None:
    batch = make_batch(12)
    cases = {
        r"target_logprobs: 1 non-finite": {"target": broken(batch.target, math.nan)},
        r"behaviour_logprobs: 1 non-finite": {"behaviour": broken(batch.behaviour, -math.inf)},
        r"target_logprobs: expected shape": {"target": batch.target[:, 1:]},
        r"lag_versions: must be >= 0": {"lag": broken(batch.lag, -1)},
        r"lag_versions: expected dtype": {"lag": batch.lag.double()},
        r"lag_versions: expected shape": {"lag": batch.lag[1:]},
        r"action_mask: no place is true": {"mask": torch.zeros_like(batch.mask)},
    }
    for message, change in cases.items():
        with pytest.raises(InputError, match=message):
            anchor_of(replace(batch, **change))
