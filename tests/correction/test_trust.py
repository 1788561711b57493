"""Single rules: what each one drops, on cases small enough to see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from correction.trust import (
    LagUnit,
    Reduction,
    dppo_kl,
    dppo_tv,
    geometric_band,
    k3_limit,
    kpop,
    opsm,
    second_moment,
    veto,
    within_lag,
)


def numbers(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def logs_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def full(values: Tensor) -> Tensor:
    return torch.ones(values.shape, dtype=torch.bool)


def kept_rows(keep: Tensor) -> list[bool]:
    assert torch.equal(keep.any(dim=1), keep.all(dim=1))
    return keep.all(dim=1).tolist()


def test_a_limit_of_n_versions_accepts_exactly_n() -> None:
    lag = torch.tensor([[0, 2, 3], [2, 1, 0]])

    def kept(unit: LagUnit) -> list[list[bool]]:
        keep: list[list[bool]] = within_lag(lag, full(lag), max_lag_versions=2, unit=unit).tolist()
        return keep

    assert kept(LagUnit.TOKEN) == [[True, True, False], [True, True, True]]
    assert kept(LagUnit.TRAJECTORY) == [[False] * 3, [True] * 3]


def test_the_oldest_token_of_a_trajectory_is_an_action_token() -> None:
    lag = torch.tensor([[0, 9]])
    mask = torch.tensor([[True, False]])
    keep = within_lag(lag, mask, max_lag_versions=0, unit=LagUnit.TRAJECTORY)
    assert keep.tolist() == [[True, True]]


def test_a_geometric_band_is_on_pi_over_mu_and_on_both_sides() -> None:
    ratios = numbers([4.0], [0.25], [5.1], [0.6]).log()
    assert kept_rows(geometric_band(ratios, full(ratios), low=0.5, high=5.0)) == [
        True,
        False,
        False,
        True,
    ]


def test_a_geometric_mean_lets_opposite_tokens_cancel_and_k3_does_not() -> None:
    logs = numbers([1.0, -1.0], [0.01, -0.01])
    mask = full(logs)

    assert kept_rows(geometric_band(logs, mask, low=0.999, high=1.001)) == [True, True]
    for reduction in Reduction:
        assert kept_rows(k3_limit(logs, mask, limit=0.1, reduction=reduction)) == [False, True]


def test_reductions_of_k3() -> None:
    """k3 of log 2 is 1 - log 2 = 0.3069."""
    logs = numbers([math.log(2), math.log(2), 0.0, 0.0])
    expected = {Reduction.MEAN: 0.153426, Reduction.SUM: 0.613706, Reduction.MAX: 0.306853}
    for reduction, value in expected.items():
        assert k3_limit(logs, full(logs), limit=value + 1e-5, reduction=reduction).all()
        assert not k3_limit(logs, full(logs), limit=value - 1e-5, reduction=reduction).any()


def test_one_token_vetoes_its_trajectory_and_no_other() -> None:
    logs = numbers([0.0, math.log(1e-5), 0.0], [0.0, math.log(1e-3), 9.0])
    assert kept_rows(veto(logs, full(logs), low=1e-4)) == [False, True]
    assert kept_rows(veto(logs, full(logs), low=0.0)) == [True, True]


def test_a_veto_reaches_below_the_clamp_of_ratios() -> None:
    logs = numbers([-25.0], [-35.0])
    assert kept_rows(veto(logs, full(logs), low=1e-12)) == [True, False]


def test_opsm_goes_by_the_mean_advantage_of_the_action_tokens() -> None:
    logs = torch.full((4, 3), -1.0, dtype=torch.float64)
    advantages = numbers([-1, -1, -1], [-1, 3, -1], [0, 0, 0], [2, -3, 1e6])
    mask = full(logs)
    mask[3, 2] = False

    assert opsm(logs, advantages, mask, limit=0.5).all(dim=1).tolist() == [
        False,
        True,
        True,
        False,
    ]
    assert opsm(-logs, advantages, mask, limit=0.5).all()


@pytest.mark.parametrize(
    ("target", "behaviour", "advantage", "keep"),
    [
        (0.5, 0.25, 1.0, False),
        (0.5, 0.25, -1.0, True),
        (0.25, 0.5, -1.0, False),
        (0.25, 0.5, 1.0, True),
        (0.5, 0.25, 0.0, True),
        (0.35, 0.25, 1.0, True),
        (0.35, 0.25, -1.0, True),
    ],
)
def test_dppo_drops_what_has_moved_far_the_way_it_is_pushed(
    target: float, behaviour: float, advantage: float, keep: bool
) -> None:
    pair = (logs_of(target), logs_of(behaviour), numbers([advantage]))
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert bool(dppo_tv(*pair, mask, low=0.2, high=0.2)) == keep
    assert bool(dppo_kl(*pair, mask, limit=0.1)) == keep


def test_rise_and_fall_have_limits_of_their_own() -> None:
    target, behaviour = logs_of(0.5, 0.25), logs_of(0.25, 0.5)
    advantages, mask = numbers([1.0, -1.0]), torch.ones(1, 2, dtype=torch.bool)
    only_rise = dppo_tv(target, behaviour, advantages, mask, low=0.3, high=0.2)
    only_fall = dppo_tv(target, behaviour, advantages, mask, low=0.2, high=0.3)
    assert only_rise.tolist() == [[False, True]]
    assert only_fall.tolist() == [[True, False]]


def bernoulli_kl(first: float, second: float) -> float:
    of_first = torch.distributions.Bernoulli(torch.tensor(first, dtype=torch.float64))
    of_second = torch.distributions.Bernoulli(torch.tensor(second, dtype=torch.float64))
    return float(torch.distributions.kl_divergence(of_first, of_second))


@pytest.mark.parametrize(("target", "behaviour"), [(0.9, 0.3), (0.01, 0.2), (0.999, 0.97)])
def test_binary_divergences_are_those_of_torch(target: float, behaviour: float) -> None:
    there, back = bernoulli_kl(behaviour, target), bernoulli_kl(target, behaviour)
    pair, mask = (logs_of(target), logs_of(behaviour)), torch.ones(1, 1, dtype=torch.bool)
    push = numbers([math.copysign(1.0, target - behaviour)])
    for factor, keep in ((1 + 1e-9, True), (1 - 1e-9, False)):
        assert bool(dppo_kl(*pair, push, mask, limit=there * factor)) == keep
        assert bool(kpop(*pair, mask, limit=max(there, back) * factor)) == keep
        assert bool(kpop(pair[1], pair[0], mask, limit=max(there, back) * factor)) == keep


def test_a_probability_that_float32_rounds_to_one_is_near_one_and_not_infinitely_far() -> None:
    one, nearly = torch.tensor([[0.0]]), torch.tensor([[-2e-7]])
    mask, up = torch.ones(1, 1, dtype=torch.bool), torch.tensor([[1.0]])

    assert bool(dppo_kl(one, nearly, up, mask, limit=1e-6))
    assert bool(kpop(one, nearly, mask, limit=1e-6))
    assert bool(kpop(nearly, one, mask, limit=1e-6))
    assert not bool(kpop(one, torch.tensor([[-0.1]]), mask, limit=0.5))


def test_the_second_moment_is_below_its_limit_strictly() -> None:
    logs = numbers([0.0, 0.5])
    assert second_moment(logs, full(logs), limit=0.125).tolist() == [[True, False]]
    assert second_moment(logs, full(logs), limit=0.12500001).tolist() == [[True, True]]


def test_equal_second_moments_share_their_fate_in_any_order() -> None:
    logs = numbers([0.5, 0.0], [-0.5, 0.1])
    expected = [[False, True], [False, True]]
    # With one of the two the mean would be 0.0867, below the limit.
    assert second_moment(logs, full(logs), limit=0.1).tolist() == expected
    flipped = logs.flip(0, 1)
    assert second_moment(flipped, full(logs), limit=0.1).flip(0, 1).tolist() == expected


@pytest.mark.parametrize(
    ("logs", "expected"),
    [([3.0, 2.0, -4.0], [False, True, False]), ([2.0, -2.0, 4.0], [True, True, False])],
)
def test_the_smallest_second_moment_is_always_kept(logs: list[float], expected: list[bool]) -> None:
    values = numbers(logs)
    assert second_moment(values, full(values), limit=0.04).tolist() == [expected]


def test_the_second_moment_is_one_of_the_whole_batch() -> None:
    logs = numbers([0.3, 0.3], [0.0, 0.0])
    mask = full(logs)
    assert second_moment(logs, mask, limit=0.05).all()
    alone = second_moment(logs, mask & torch.tensor([[True], [False]]), limit=0.05)
    assert alone.all(), "the two tie, and one at least is kept"
    assert second_moment(numbers([0.3, 0.2]), full(logs[:1]), limit=0.05).tolist() == [
        [False, True]
    ]
