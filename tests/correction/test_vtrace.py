from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.errors import InputError
from correction.ratios import Level
from correction.steps import StepUnit
from correction.token_advantages import terminal_rewards
from correction.vtrace import vtrace
from tests.correction.episodes import GARBAGE, Episodes, gae_of, make_episodes, vtrace_of

INFINITY = float("inf")
every_unit = pytest.mark.parametrize("unit", list(StepUnit))
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
FIELDS = ("value_targets", "advantages", "ratios", "rho")


@every_unit
@settings(deadline=None)
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_on_policy_it_is_gae_with_lambda_1(unit: StepUnit, seed: int, gamma: float) -> None:
    episodes = make_episodes(seed, spread=0.0)

    trace = vtrace_of(episodes, unit, gamma=gamma)
    estimate = gae_of(episodes, unit, gamma=gamma, gae_lambda=1.0)

    torch.testing.assert_close(trace.value_targets, estimate.value_targets, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(trace.advantages, estimate.advantages, rtol=1e-12, atol=1e-12)
    assert bool((trace.ratios[episodes.mask] == 1).all())


@every_unit
@both_dtypes
@pytest.mark.parametrize("garbage", GARBAGE)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_masked_places_change_no_bit(
    unit: StepUnit, dtype: torch.dtype, garbage: float, seed: int
) -> None:
    episodes = make_episodes(seed).to(dtype)
    clean = vtrace_of(episodes, unit, rho_bar=2.0, c_bar=1.5)
    dirty = vtrace_of(episodes.with_garbage(garbage), unit, rho_bar=2.0, c_bar=1.5)

    for name in FIELDS:
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name
        assert bool((getattr(dirty, name)[~episodes.mask] == 0).all()), name


@every_unit
@pytest.mark.parametrize("level", [Level.TURN_PRODUCT, Level.TURN_GEOMETRIC])
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_each_trajectory_is_as_alone_and_without_its_gaps(
    unit: StepUnit, level: Level, seed: int
) -> None:
    episodes = make_episodes(seed, rows=4, columns=11)
    together = vtrace_of(episodes, unit, gamma=0.9, turn_level=level)
    for index, name in itertools.product(range(4), FIELDS):
        alone = vtrace_of(episodes.alone(index), unit, gamma=0.9, turn_level=level)
        packed = getattr(together, name)[index, episodes.mask[index]]
        torch.testing.assert_close(packed, getattr(alone, name)[0], rtol=1e-12, atol=1e-12)


@every_unit
def test_batch_order_changes_nothing(unit: StepUnit) -> None:
    episodes, order = make_episodes(5, rows=4), torch.tensor([2, 0, 3, 1])
    estimate, shuffled = vtrace_of(episodes, unit), vtrace_of(episodes.rows(order), unit)
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(shuffled, name), getattr(estimate, name)[order], rtol=1e-12, atol=1e-12
        )


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), baseline=st.floats(-2, 2), reward=st.floats(-2, 2))
def test_with_a_constant_for_a_critic_credit_is_the_suffix_product(
    seed: int, baseline: float, reward: float
) -> None:
    """A_t = (R - b) times the product of min(1, w) over t and all after it."""
    episodes = make_episodes(seed, rows=1, columns=9)
    rewards = torch.tensor([reward], dtype=torch.float64)
    ended = replace(
        episodes,
        rewards=terminal_rewards(rewards, episodes.mask),
        values=torch.full_like(episodes.values, baseline),
        bootstrap=torch.zeros_like(episodes.bootstrap),
    )

    trace = vtrace_of(ended)

    ratios = ended.log_ratios[ended.mask].exp().clamp(max=1).tolist()
    wanted = [(reward - baseline) * math.prod(ratios[t:]) for t in range(len(ratios))]
    got = trace.advantages[ended.mask].tolist()
    assert got == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def one_step(boot: float) -> Episodes:
    value = torch.ones(1, 1, dtype=torch.float64)
    return Episodes(
        torch.zeros_like(value),
        torch.zeros_like(value),
        value,
        torch.tensor([boot], dtype=torch.float64),
        value.bool(),
        torch.zeros(1, 1, dtype=torch.int64),
    )


def test_a_truncated_row_never_bootstraps_from_the_next_row() -> None:
    """V of row A is 1 before and after its cut, V of row B is 100: A's advantage is 0, not 99."""
    a = one_step(1.0)
    batch = replace(
        a.rows(torch.tensor([0, 0])),
        values=torch.tensor([[1.0], [100.0]], dtype=torch.float64),
        bootstrap=torch.tensor([1.0, 100.0], dtype=torch.float64),
    )

    trace = vtrace_of(batch)

    assert trace.advantages.tolist() == [[0.0], [0.0]]
    assert vtrace_of(one_step(0.0)).advantages.tolist() == [[-1.0]]


def test_the_last_reward_counts() -> None:
    ended = replace(one_step(0.0), rewards=torch.full((1, 1), 3.0, dtype=torch.float64))

    assert vtrace_of(ended).value_targets.tolist() == [[3.0]]


@pytest.mark.parametrize(
    ("rho_bar", "wanted"), [(1.0, (2 / 3, 1 / 3)), (INFINITY, (0.8, 0.2)), (1e-9, (0.4, 0.6))]
)
def test_the_fixed_point_is_the_value_of_the_bounded_policy(
    rho_bar: float, wanted: tuple[float, float]
) -> None:
    """theta = (.8, .2), mu = (.4, .6), one step: where mu's mean correction is 0.

    The value learnt is that of the policy proportional to min(rho_bar mu, theta).
    """
    behaviour = torch.tensor([0.4, 0.6], dtype=torch.float64)
    logs = (torch.tensor([0.8, 0.2], dtype=torch.float64) / behaviour).log()[:, None]
    rewards = torch.tensor([[5.0], [-1.0]], dtype=torch.float64)
    value = wanted[0] * 5.0 - wanted[1]

    trace = vtrace(
        logs,
        rewards,
        torch.full_like(rewards, value),
        torch.zeros(2),
        torch.ones(2, 1, dtype=torch.bool),
        torch.zeros(2, 1, dtype=torch.int64),
        gamma=1.0,
        unit=StepUnit.TOKEN,
        rho_bar=rho_bar,
        c_bar=min(rho_bar, 1.0),
    )

    mean_correction = (behaviour * (trace.value_targets[:, 0] - value)).sum()
    assert float(mean_correction) == pytest.approx(0.0, abs=1e-12 * max(1.0, 1 / rho_bar))


def expected_direction(critic: list[float] | None, bar: float) -> Tensor:
    """Mean of the policy-gradient direction over all four texts of two binary tokens.

    p(1) of theta: .6, then .3 after a 0 and .8 after a 1; of mu: .3, .5, .7. Rewards: 01 gives 1,
    11 gives 3. critic: V of the root and after 0 and 1; none is the constant 0.98.
    """
    target, behaviour = (0.6, 0.3, 0.8), (0.3, 0.5, 0.7)
    texts = [(0, 0), (0, 1), (1, 0), (1, 1)]

    def chance(policy: tuple[float, ...], text: tuple[int, int]) -> list[float]:
        states = (0, 1 + text[0])
        return [policy[s] if bit else 1 - policy[s] for s, bit in zip(states, text, strict=True)]

    logs = [
        [math.log(p / q) for p, q in zip(chance(target, t), chance(behaviour, t), strict=True)]
        for t in texts
    ]
    values = [[0.98] * 2 if critic is None else [critic[0], critic[1 + t[0]]] for t in texts]
    rewards = torch.tensor([[0.0, t[1] * (1.0 + 2 * t[0])] for t in texts], dtype=torch.float64)
    trace = vtrace(
        torch.tensor(logs, dtype=torch.float64),
        rewards,
        torch.tensor(values, dtype=torch.float64),
        torch.zeros(4),
        torch.ones(4, 2, dtype=torch.bool),
        torch.zeros(4, 2, dtype=torch.int64),
        gamma=1.0,
        unit=StepUnit.TOKEN,
        rho_bar=bar,
        c_bar=bar,
        pg_rho_bar=bar,
    )
    direction = [0.0, 0.0, 0.0]
    for text, advantages in zip(texts, trace.advantages.tolist(), strict=True):
        reached = math.prod(chance(behaviour, text))
        for state, bit, advantage in zip((0, 1 + text[0]), text, advantages, strict=True):
            direction[state] += reached * advantage * (bit - target[state])
    return torch.tensor(direction, dtype=torch.float64)


@pytest.mark.parametrize(
    ("critic", "bar", "wanted"),
    [
        (None, INFINITY, [0.504, 0.147, 0.144]),
        (None, 1.0, [0.26232, 0.10584, 0.13188]),
        ([1.56, 0.3, 2.4], INFINITY, [0.504, 0.147, 0.144]),
        ([1.56, 0.3, 2.4], 1.0, [0.3816, 0.1344, 0.1404]),
    ],
)
def test_exact_enumeration(critic: list[float] | None, bar: float, wanted: list[float]) -> None:
    """The truth is .504, .084, .288: V-trace repairs the continuation, never mu's states."""
    torch.testing.assert_close(
        expected_direction(critic, bar), torch.tensor(wanted, dtype=torch.float64)
    )


def test_bars_bound_what_they_name() -> None:
    episodes = make_episodes(1, spread=1.0)
    estimate = vtrace_of(episodes, rho_bar=1.5, c_bar=1.0)

    wanted = episodes.log_ratios.exp() * episodes.mask
    torch.testing.assert_close(estimate.ratios, wanted)
    torch.testing.assert_close(estimate.rho, wanted.clamp(max=1.5))


def test_no_gradient_flows_and_16_bits_are_widened() -> None:
    episodes = make_episodes(2).to(torch.bfloat16)
    wired = replace(
        episodes,
        values=episodes.values.clone().requires_grad_(),
        log_ratios=episodes.log_ratios.clone().requires_grad_(),
    )

    estimate = vtrace_of(wired)

    for name in FIELDS:
        assert getattr(estimate, name).dtype == torch.float32
        assert not getattr(estimate, name).requires_grad


def test_an_unbounded_trace_that_overflows_is_refused() -> None:
    columns = 64
    shape = (1, columns)
    wild = Episodes(
        torch.full(shape, 19.0),
        torch.ones(shape),
        torch.zeros(shape),
        torch.zeros(1),
        torch.ones(shape, dtype=torch.bool),
        torch.zeros(shape, dtype=torch.int64),
    )

    with pytest.raises(InputError, match="log_ratios, token_rewards, values: too large"):
        vtrace_of(wild, rho_bar=INFINITY, c_bar=INFINITY, pg_rho_bar=INFINITY)
    assert bool(vtrace_of(wild).advantages.isfinite().all())


def test_an_advantage_that_overflows_behind_a_finite_target_is_refused() -> None:
    step = replace(
        one_step(0.0),
        log_ratios=torch.full((1, 1), 20.0),
        rewards=torch.full((1, 1), 1e35),
    ).to(torch.float32)

    with pytest.raises(InputError, match="too large, the result overflows"):
        vtrace_of(step, pg_rho_bar=INFINITY)
    assert float(vtrace_of(step).advantages) == pytest.approx(1e35, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, r"gamma: expected a number in \[0, 1\]"),
        ({"gamma": math.nan}, "gamma"),
        ({"trace_lambda": -0.1}, r"trace_lambda: expected a number in \[0, 1\]"),
        ({"rho_bar": 0.0}, "rho_bar: expected a number above 0"),
        ({"rho_bar": math.nan}, "rho_bar"),
        ({"pg_rho_bar": -1.0}, "pg_rho_bar: expected a number above 0"),
        ({"c_bar": 1.5}, r"c_bar: expected at most rho_bar \(1.0\), got 1.5"),
    ],
)
def test_parameters_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        vtrace_of(make_episodes(0), **options)  # type: ignore[arg-type]


def test_a_turn_has_the_level_of_a_turn() -> None:
    with pytest.raises(InputError, match="turn_level: expected turn_product or turn_geometric"):
        vtrace_of(make_episodes(0), StepUnit.TURN, turn_level=Level.GEOMETRIC)


def first_action_set(episodes: Episodes, values: Tensor, value: float) -> Tensor:
    changed = values.clone()
    changed[tuple(episodes.mask.nonzero()[0])] = value
    return changed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_ratios_of_action_tokens_are_finite(value: float) -> None:
    episodes = make_episodes(0)
    broken = first_action_set(episodes, episodes.log_ratios, value)
    with pytest.raises(InputError, match="log_ratios: 1 non-finite values"):
        vtrace_of(replace(episodes, log_ratios=broken))


def test_shapes_and_dtypes() -> None:
    episodes = make_episodes(0)
    for broken, message in (
        (replace(episodes, log_ratios=episodes.log_ratios[:2]), r"log_ratios: expected shape"),
        (replace(episodes, rewards=episodes.rewards[:2]), "token_rewards: expected shape"),
        (replace(episodes, values=episodes.values.long()), "values: expected a floating"),
        (replace(episodes, bootstrap=episodes.bootstrap[:2]), "bootstrap_values: expected shape"),
        (replace(episodes, mask=episodes.mask & False), "mask: no place is true"),
    ):
        with pytest.raises(InputError, match=message):
            vtrace_of(broken)


def test_a_reward_on_a_tool_token_is_refused_and_not_dropped() -> None:
    episodes = make_episodes(0)
    assert not bool(episodes.mask.all())
    misplaced = torch.where(episodes.mask, episodes.rewards, 9.0)
    with pytest.raises(
        InputError, match=r"token_rewards: must be 0 where the mask is false, got 9"
    ):
        vtrace_of(replace(episodes, rewards=misplaced))
