from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.bounds import (
    BOUND_PARAMETERS,
    SIGNED_BOUNDS,
    VESPO_NEGATIVE,
    VESPO_POSITIVE,
    Bound,
    BoundedWeight,
    GammaShape,
    bound_weight,
)
from correction.errors import InputError

every_bound = pytest.mark.parametrize("bound", Bound)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
LOGS = st.lists(st.floats(-60, 60), min_size=1, max_size=12)


def bounded(logs: list[float], bound: Bound, advantage: float, **limits: float) -> BoundedWeight:
    values = torch.tensor([logs], dtype=torch.float64)
    return bound_weight(
        values,
        bound,
        **{"low": 0.5, "high": 2.0, **limits},
        advantages=torch.full_like(values, advantage),
    )


def slow_weight(log: float, bound: Bound, advantage: float) -> float:
    ratio = math.exp(max(-20.0, min(20.0, log)))
    if bound is Bound.TRUNCATE:
        return min(ratio, 2.0)
    if bound is Bound.CLIP:
        return max(0.5, min(ratio, 2.0))
    if bound is Bound.BAND:
        return ratio if 0.5 <= ratio <= 2.0 else 0.0
    if bound is Bound.TOPR:
        return 1.0 if advantage > 0 else min(ratio, 1.0)
    if bound is Bound.VESPO:
        power, rate = (2, 3) if advantage >= 0 else (3, 2)
        exponent = rate * (1 - ratio)
        return ratio**power * math.exp(exponent) if exponent > -700 else 0.0
    return ratio


@every_bound
@settings(max_examples=100, deadline=None)
@given(logs=LOGS, advantage=st.sampled_from([2.0, 0.0, -2.0]))
def test_a_weight_is_its_slow_truth(bound: Bound, logs: list[float], advantage: float) -> None:
    weight = bounded(logs, bound, advantage)

    wanted = [slow_weight(log, bound, advantage) for log in logs]
    assert weight.weight[0].tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-250)
    assert torch.equal(weight.changed, weight.weight != weight.raw)
    assert torch.isfinite(weight.weight).all()
    assert (weight.weight >= 0).all()
    assert not bool(weight.weight[weight.rejected].any())


@every_bound
@both_dtypes
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_of_one_is_weight_one_to_the_bit(
    bound: Bound, dtype: torch.dtype, advantage: float
) -> None:
    logs = torch.zeros(2, 3, dtype=dtype)
    weight = bound_weight(
        logs, bound, low=1.0, high=1.0, advantages=torch.full_like(logs, advantage)
    )
    assert weight.weight.dtype == dtype
    assert torch.equal(weight.weight, torch.ones_like(logs))
    assert not weight.changed.any()
    assert not weight.rejected.any()


@every_bound
def test_parameters_are_looked_at_where_the_table_says_so(bound: Bound) -> None:
    logs = [-3.0, -0.5, 0.0, 0.5, 3.0]
    for advantage in (1.0, -1.0):
        usual = bounded(logs, bound, advantage).weight
        moved = {
            "low": bounded(logs, bound, advantage, low=0.7).weight,
            "high": bounded(logs, bound, advantage, high=1.3).weight,
        }
        looked_at = {name for name, weight in moved.items() if not torch.equal(weight, usual)}
        assert looked_at == BOUND_PARAMETERS[bound]


@every_bound
@settings(max_examples=50, deadline=None)
@given(logs=LOGS, advantage=st.sampled_from([2.0, -2.0]))
def test_only_a_band_rejects_and_rejection_only_removes(
    bound: Bound, logs: list[float], advantage: float
) -> None:
    weight = bounded(logs, bound, advantage)
    if bound is not Bound.BAND:
        assert not weight.rejected.any()
    kept = ~weight.rejected
    if bound is Bound.BAND:
        assert torch.equal(weight.weight[kept], weight.raw[kept])


@every_bound
def test_weights_have_no_gradient(bound: Bound) -> None:
    logs = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    advantages = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    weight = bound_weight(logs, bound, low=0.5, high=2.0, advantages=advantages)
    assert not weight.weight.requires_grad
    assert not weight.raw.requires_grad


@pytest.mark.parametrize("bound", sorted(SIGNED_BOUNDS))
def test_a_signed_bound_needs_advantages_of_its_shape(bound: Bound) -> None:
    logs = torch.zeros(2, 3)

    def call(advantages: Tensor | None) -> BoundedWeight:
        return bound_weight(logs, bound, low=0.5, high=2.0, advantages=advantages)

    with pytest.raises(InputError, match=f"advantages: missing, bound = {bound} needs it"):
        call(None)
    with pytest.raises(InputError, match=r"advantages: expected shape \[2, 3\], got \[2, 1\]"):
        call(torch.zeros(2, 1))
    with pytest.raises(InputError, match="advantages: expected a floating-point dtype"):
        call(torch.zeros(2, 3, dtype=torch.int64))


@every_bound
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
def test_an_advantage_of_a_masked_place_does_not_matter(bound: Bound, garbage: float) -> None:
    """There the log weight is 0 (`ratios.at_level`), and the weight 1 whatever the advantage."""
    logs, advantages = torch.tensor([[0.4, 0.0]]), torch.tensor([[-1.0, garbage]])
    weight = bound_weight(logs, bound, low=0.5, high=2.0, advantages=advantages)
    assert float(weight.weight[0, 1]) == 1.0


@pytest.mark.parametrize(
    ("advantage", "shape", "largest"),
    [(1.0, VESPO_POSITIVE, 1.2081252571), (-1.0, VESPO_NEGATIVE, 1.2415931140)],
)
def test_vespo_is_largest_at_power_over_rate_and_fades_on_both_sides(
    advantage: float, shape: GammaShape, largest: float
) -> None:
    peak = shape.power / shape.rate
    ratios = [peak * 1e-4, peak * 0.5, peak * 0.99, peak, peak * 1.01, peak * 2, peak * 20]
    weights = bounded([math.log(ratio) for ratio in ratios], Bound.VESPO, advantage).weight[0]
    assert int(weights.argmax()) == 3
    assert weights[0] < 1e-6
    assert weights[-1] < 1e-6
    assert float(weights[3]) == pytest.approx(largest, rel=1e-9)


@both_dtypes
@pytest.mark.parametrize("log", [-1e6, -20.0, 20.0, 1e6])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_vespo_never_overflows(dtype: torch.dtype, log: float, advantage: float) -> None:
    logs = torch.tensor([log], dtype=dtype)
    weight = bound_weight(
        logs, Bound.VESPO, low=0.5, high=2.0, advantages=torch.full_like(logs, advantage)
    )
    assert 0.0 <= float(weight.weight) < 1e-14
