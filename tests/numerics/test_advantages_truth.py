"""Every estimator against its slow truth on random batches: 1e-12 in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.optimal_baseline import opob_advantages
from correction.ratios import Level
from correction.steps import StepUnit
from correction.tail_advantages import tail_advantages
from correction.token_advantages import (
    WhitenUnit,
    discounted_returns,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
)
from tests.correction.episodes import Episodes, gae_of, make_episodes, vtrace_of
from tests.numerics.slow_advantages import (
    SlowSteps,
    slow_gae,
    slow_opob,
    slow_returns,
    slow_steps,
    slow_tail,
    slow_vtrace,
    slow_whitened,
)

INFINITY = float("inf")
UNITS = {
    "token": (StepUnit.TOKEN, Level.TURN_GEOMETRIC),
    "turn_product": (StepUnit.TURN, Level.TURN_PRODUCT),
    "turn_geometric": (StepUnit.TURN, Level.TURN_GEOMETRIC),
}
any_seed = st.integers(0, 2**31)
random_batches = given(
    seed=any_seed,
    rows=st.integers(1, 4),
    columns=st.integers(1, 17),
    unit=st.sampled_from(sorted(UNITS)),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
)


def slow_rows(episodes: Episodes, unit: str) -> list[SlowSteps]:
    return [
        slow_steps(
            episodes.mask[row].tolist(),
            episodes.turns[row].tolist(),
            episodes.rewards[row].tolist(),
            episodes.values[row].tolist(),
            float(episodes.bootstrap[row]),
            episodes.log_ratios[row].tolist(),
            unit,
        )
        for row in range(len(episodes.mask))
    ]


def assert_true(actual: Tensor, wanted: Sequence[object], tolerance: float = 1e-12) -> None:
    truth = torch.tensor(wanted, dtype=torch.float64)
    size = max(1.0, float(truth.abs().max()))
    torch.testing.assert_close(actual.double(), truth, rtol=tolerance, atol=tolerance * size)


@settings(max_examples=150, deadline=None)
@random_batches
def test_gae(seed: int, rows: int, columns: int, unit: str, gamma: float) -> None:
    episodes = make_episodes(seed, rows, columns)
    slow = [slow_gae(row, gamma, 0.95) for row in slow_rows(episodes, unit)]

    estimate = gae_of(episodes, UNITS[unit][0], gamma=gamma)
    narrow = gae_of(episodes.to(torch.float32), UNITS[unit][0], gamma=gamma)

    for name, index in (("advantages", 0), ("value_targets", 1)):
        assert_true(getattr(estimate, name), [row[index] for row in slow])
        assert getattr(narrow, name).dtype == torch.float32
        assert_true(getattr(narrow, name), [row[index] for row in slow], 1e-5)


@settings(max_examples=60, deadline=None)
@given(seed=any_seed, unit=st.sampled_from(["token", "turn_product"]), alpha=st.floats(0.05, 2.0))
def test_length_adaptive_lambda(seed: int, unit: str, alpha: float) -> None:
    episodes = make_episodes(seed, 3, 11)
    slow = [
        slow_gae(row, 0.9, max(0.0, 1 - 1 / (alpha * len(row.places))))[0]
        for row in slow_rows(episodes, unit)
    ]

    estimate = gae_of(episodes, UNITS[unit][0], gamma=0.9, length_alpha=alpha)

    assert_true(estimate.advantages, slow)


@settings(max_examples=200, deadline=None)
@random_batches
@pytest.mark.parametrize(
    ("trace_lambda", "rho_bar", "c_bar", "pg_rho_bar"),
    [
        (1.0, 1.0, 1.0, 1.0),
        (0.9, 2.0, 1.0, 1.5),
        (1.0, 1.2, 1.2, INFINITY),
        (0.5, INFINITY, INFINITY, INFINITY),
    ],
)
def test_vtrace(
    trace_lambda: float,
    rho_bar: float,
    c_bar: float,
    pg_rho_bar: float,
    seed: int,
    rows: int,
    columns: int,
    unit: str,
    gamma: float,
) -> None:
    episodes = make_episodes(seed, rows, columns, spread=0.7)
    step, level = UNITS[unit]
    slow = [
        slow_vtrace(row, gamma, trace_lambda, rho_bar, c_bar, pg_rho_bar)
        for row in slow_rows(episodes, unit)
    ]
    options = {
        "gamma": gamma,
        "trace_lambda": trace_lambda,
        "rho_bar": rho_bar,
        "c_bar": c_bar,
        "pg_rho_bar": pg_rho_bar,
    }

    estimate = vtrace_of(episodes, step, turn_level=level, **options)
    narrow = vtrace_of(episodes.to(torch.float32), step, turn_level=level, **options)

    for name, index in (("value_targets", 0), ("advantages", 1)):
        assert_true(getattr(estimate, name), [row[index] for row in slow])
        assert getattr(narrow, name).dtype == torch.float32
        assert_true(getattr(narrow, name), [row[index] for row in slow], 1e-5)
    raw = [row.to_tokens(row.ratios) for row in slow_rows(episodes, unit)]
    assert_true(estimate.ratios, raw)
    assert_true(estimate.rho, [[min(rho_bar, ratio) for ratio in row] for row in raw])


@settings(max_examples=60, deadline=None)
@given(seed=any_seed, gamma=st.sampled_from([0.0, 0.9, 1.0]), ddof=st.sampled_from([0, 1]))
def test_reinforce_pp(seed: int, gamma: float, ddof: int) -> None:
    episodes = make_episodes(seed, 3, 9)
    mask = episodes.mask
    returns = [
        slow_returns(mask[row].tolist(), episodes.rewards[row].tolist(), gamma) for row in range(3)
    ]
    flat = torch.tensor(returns, dtype=torch.float64)[mask].tolist()
    wanted = torch.zeros(3, 9, dtype=torch.float64)
    wanted[mask] = torch.tensor(
        slow_whitened(flat, [1.0] * len(flat), True, ddof, 1e-8), dtype=torch.float64
    )

    assert_true(discounted_returns(episodes.rewards, mask, gamma=gamma), returns)
    white = reinforce_pp_advantages(episodes.rewards, mask, gamma=gamma, std_ddof=ddof)
    assert_true(white, wanted.tolist())


@settings(max_examples=60, deadline=None)
@given(
    seed=any_seed,
    unit=st.sampled_from(WhitenUnit),
    recenter=st.booleans(),
    ddof=st.sampled_from([0, 1]),
)
def test_reinforce_pp_baseline(seed: int, unit: WhitenUnit, recenter: bool, ddof: int) -> None:
    mask = make_episodes(seed, 5, 7).mask
    rewards = torch.tensor([0.1, 2.0, -1.0, 0.3, 0.5], dtype=torch.float64)
    groups = torch.tensor([4, 9, 4, 9, 4])
    centred = [0.1 + 0.4 / 3, 2.0 - 1.15, -1.0 + 0.4 / 3, 0.3 - 1.15, 0.5 + 0.4 / 3]
    counts = [float(n) for n in mask.sum(dim=1).tolist()]
    white = slow_whitened(
        centred, counts if unit is WhitenUnit.TOKEN else [1.0] * 5, recenter, ddof, 1e-8
    )

    advantages = reinforce_pp_baseline_advantages(
        rewards, groups, mask, unit=unit, recenter=recenter, std_ddof=ddof
    )

    wanted = torch.tensor(white, dtype=torch.float64)[:, None] * mask
    assert_true(advantages, wanted.tolist())


rewards_of_groups = st.lists(
    st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9), min_size=1, max_size=4
)


def interleaved(groups: list[list[float]], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards and group index in random order, and that order."""
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    index = torch.tensor([7 - 3 * i for i, group in enumerate(groups) for _ in group])
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    return rewards[order], index[order], order


@settings(max_examples=150, deadline=None)
@given(groups=rewards_of_groups, seed=any_seed)
def test_tail_advantages(groups: list[list[float]], seed: int) -> None:
    rewards, index, order = interleaved(groups, seed)
    wanted = [a for group in groups for a in slow_tail(group)]

    advantages = tail_advantages(rewards, index)
    unscaled = tail_advantages(rewards, index, scale_by_group_size=False)

    assert_true(advantages, [wanted[i] for i in order])
    sizes = torch.tensor([len(group) for group in groups for _ in group])[order]
    assert_true(unscaled * sizes, [wanted[i] for i in order])


@settings(max_examples=100, deadline=None)
@given(groups=rewards_of_groups, seed=any_seed)
def test_optimal_baseline(groups: list[list[float]], seed: int) -> None:
    rewards, index, order = interleaved(groups, seed)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(len(rewards), generator=generator, dtype=torch.float64) + 0.01
    norms = 10 * torch.rand(len(rewards), generator=generator, dtype=torch.float64) + 0.01
    wanted, begin = [], 0
    for group in groups:
        members = slice(begin, begin + len(group))
        wanted += slow_opob(group, weights[members].tolist(), norms[members].tolist())
        begin += len(group)

    advantages = opob_advantages(rewards, index, weights[order], norms[order])

    assert_true(advantages, [wanted[i] for i in order])
