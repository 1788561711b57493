from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from correction.errors import InputError
from correction.reuse import ess_learning_rate_factor

shares = st.floats(0, 1)
bases = st.floats(1e-3, 1)


@given(ess=shares, base=bases, power=st.floats(1e-3, 4))
def test_it_is_a_factor_and_never_above_one(ess: float, base: float, power: float) -> None:
    assert 0.0 <= ess_learning_rate_factor(ess, base_ratio=base, power=power) <= 1.0


@given(ess=shares, base=bases)
def test_the_full_rate_belongs_to_the_base_and_above(ess: float, base: float) -> None:
    factor = ess_learning_rate_factor(ess, base_ratio=base, power=0.5)
    if ess >= base:
        assert factor == 1.0
    elif ess < base * (1 - 1e-9):
        assert factor < 1.0


@given(ess=shares, base=bases)
def test_the_square_root_rule_squared_is_the_linear_one(ess: float, base: float) -> None:
    root = ess_learning_rate_factor(ess, base_ratio=base, power=0.5)
    linear = ess_learning_rate_factor(ess, base_ratio=base, power=1.0)
    assert root**2 == pytest.approx(linear, rel=1e-12, abs=1e-300)
    assert linear == pytest.approx(min(1.0, ess / base))


@given(left=shares, right=shares, base=bases)
def test_a_larger_share_never_has_a_smaller_rate(left: float, right: float, base: float) -> None:
    low, high = sorted((left, right))
    assert ess_learning_rate_factor(low, base_ratio=base, power=0.5) <= (
        ess_learning_rate_factor(high, base_ratio=base, power=0.5)
    )


def test_an_all_rejected_batch_has_no_rate_and_rounding_above_one_is_one() -> None:
    assert ess_learning_rate_factor(0.0, base_ratio=0.5, power=0.5) == 0.0
    assert ess_learning_rate_factor(1.0 + 1e-9, base_ratio=1.0, power=0.5) == 1.0


@pytest.mark.parametrize(
    ("named", "ess", "base", "power"),
    [
        ("ess_ratio", -0.1, 0.5, 0.5),
        ("ess_ratio", 1.1, 0.5, 0.5),
        ("ess_ratio", math.nan, 0.5, 0.5),
        ("base_ratio", 0.5, 0.0, 0.5),
        ("base_ratio", 0.5, 1.5, 0.5),
        ("base_ratio", 0.5, math.nan, 0.5),
        ("power", 0.5, 0.5, 0.0),
        ("power", 0.5, 0.5, math.inf),
        ("power", 0.5, 0.5, math.nan),
    ],
)
def test_bad_input_is_refused(named: str, ess: float, base: float, power: float) -> None:
    with pytest.raises(InputError, match=f"^{named}: expected"):
        ess_learning_rate_factor(ess, base_ratio=base, power=power)
