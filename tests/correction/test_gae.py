from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.errors import InputError
from correction.steps import StepUnit
from correction.token_advantages import discounted_returns
from tests.correction.episodes import GARBAGE, Episodes, gae_of, make_episodes

every_unit = pytest.mark.parametrize("unit", list(StepUnit))
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def row(mask: list[int], rewards: list[float], values: list[float], boot: float) -> Episodes:
    places = torch.tensor([mask]).bool()
    return Episodes(
        torch.zeros(places.shape, dtype=torch.float64),
        torch.tensor([rewards], dtype=torch.float64),
        torch.tensor([values], dtype=torch.float64),
        torch.tensor([boot], dtype=torch.float64),
        places,
        torch.zeros(places.shape, dtype=torch.int64),
    )


def test_a_value_in_the_padding_is_not_bootstrapped_from() -> None:
    """The right advantages are 0.95 and 1; with the padding's value they would be 5.7 and 6."""
    estimate = gae_of(row([1, 1, 0], [0, 1, 0], [0, 0, 100], boot=0.0))

    torch.testing.assert_close(estimate.advantages[0, :2].tolist(), [0.95, 1.0])


def test_a_truncated_episode_goes_on_and_a_terminated_one_ends() -> None:
    """One step with V = 1, nothing earned, the state after it worth 1 as well."""
    cut, ended = (row([1], [0.0], [1.0], boot) for boot in (1.0, 0.0))

    assert gae_of(cut).advantages.tolist() == [[0.0]]
    assert gae_of(ended).advantages.tolist() == [[-1.0]]
    assert gae_of(cut).value_targets.tolist() == [[1.0]]
    assert gae_of(ended).value_targets.tolist() == [[0.0]]


@every_unit
@both_dtypes
@pytest.mark.parametrize("garbage", GARBAGE)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_masked_places_change_no_bit(
    unit: StepUnit, dtype: torch.dtype, garbage: float, seed: int
) -> None:
    episodes = make_episodes(seed).to(dtype)
    clean, dirty = gae_of(episodes, unit), gae_of(episodes.with_garbage(garbage), unit)

    assert torch.equal(clean.advantages, dirty.advantages)
    assert torch.equal(clean.value_targets, dirty.value_targets)
    assert bool((dirty.advantages[~episodes.mask] == 0).all())
    assert bool((dirty.value_targets[~episodes.mask] == 0).all())


@every_unit
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_each_trajectory_is_as_alone_and_without_its_gaps(unit: StepUnit, seed: int) -> None:
    episodes = make_episodes(seed, rows=4, columns=11)
    together = gae_of(episodes, unit, gamma=0.9)
    for index in range(4):
        alone = gae_of(episodes.alone(index), unit, gamma=0.9)
        packed = together.advantages[index, episodes.mask[index]]
        torch.testing.assert_close(packed, alone.advantages[0], rtol=1e-12, atol=1e-12)
        targets = together.value_targets[index, episodes.mask[index]]
        torch.testing.assert_close(targets, alone.value_targets[0], rtol=1e-12, atol=1e-12)


@every_unit
def test_batch_order_and_padding_rows_change_nothing(unit: StepUnit) -> None:
    episodes = make_episodes(5, rows=4)
    order = torch.tensor([2, 0, 3, 1])
    estimate = gae_of(episodes, unit)

    shuffled = gae_of(episodes.rows(order), unit)
    torch.testing.assert_close(
        shuffled.advantages, estimate.advantages[order], rtol=1e-12, atol=1e-12
    )

    mask, bootstrap = episodes.mask.clone(), episodes.bootstrap.clone()
    mask[1], bootstrap[1] = False, math.nan
    rewards = episodes.rewards * mask
    without = gae_of(replace(episodes, mask=mask, bootstrap=bootstrap, rewards=rewards), unit)
    others = torch.tensor([0, 2, 3])
    assert torch.equal(without.advantages[others], estimate.advantages[others])
    assert bool((without.advantages[1] == 0).all())


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([0.0, 0.7, 1.0]))
def test_lambda_1_is_the_return_minus_the_value(seed: int, gamma: float) -> None:
    episodes = make_episodes(seed)
    ended = replace(episodes, bootstrap=torch.zeros_like(episodes.bootstrap))

    estimate = gae_of(ended, gamma=gamma, gae_lambda=1.0)

    returns = discounted_returns(ended.rewards, ended.mask, gamma=gamma)
    torch.testing.assert_close(estimate.value_targets, returns, rtol=1e-12, atol=1e-12)
    wanted = (returns - ended.values) * ended.mask
    torch.testing.assert_close(estimate.advantages, wanted, rtol=1e-12, atol=1e-12)


def test_turns_of_one_token_each_are_tokens() -> None:
    episodes = make_episodes(7)
    apart = replace(episodes, turns=torch.arange(8).expand(3, 8))

    assert torch.equal(
        gae_of(apart, StepUnit.TURN).advantages, gae_of(apart, StepUnit.TOKEN).advantages
    )


def test_length_alpha_gives_short_answers_less_and_is_never_negative() -> None:
    two = row([1, 1], [0, 1], [0, 0], 0.0)

    halved = gae_of(two, length_alpha=1.0)
    assert halved.advantages.tolist() == [[0.5, 1.0]]
    short = gae_of(two, length_alpha=0.05)
    assert short.advantages.tolist() == [[0.0, 1.0]]


def test_no_gradient_flows_and_16_bits_are_widened() -> None:
    episodes = make_episodes(2)
    values = episodes.values.to(torch.bfloat16).requires_grad_()
    narrow = replace(episodes.to(torch.bfloat16), values=values)

    estimate = gae_of(narrow)

    assert estimate.advantages.dtype == torch.float32
    assert not estimate.advantages.requires_grad
    assert not estimate.value_targets.requires_grad


def first_set(values: Tensor, value: float) -> Tensor:
    """`values` with its first place, an action token, set."""
    changed = values.clone()
    changed[(0,) * values.dim()] = value
    return changed


GOOD = row([1, 1, 0], [0, 1, 0], [0.5, 0.4, 0], 0.0)
BROKEN = {
    "rewards of another shape": (
        replace(GOOD, rewards=GOOD.rewards[:, :2]),
        r"token_rewards: expected shape \[1, 3\], got \[1, 2\]",
    ),
    "values of another shape": (
        replace(GOOD, values=GOOD.values[0]),
        r"values: expected shape \[1, 3\], got \[3\]",
    ),
    "a bootstrap value a token": (
        replace(GOOD, bootstrap=GOOD.values),
        r"bootstrap_values: expected shape \[1\], got \[1, 3\]",
    ),
    "integer values": (
        replace(GOOD, values=GOOD.values.long()),
        "values: expected a floating-point dtype",
    ),
    "a mask of numbers": (replace(GOOD, mask=GOOD.mask.int()), "mask: expected dtype torch.bool"),
    "an empty mask": (replace(GOOD, mask=GOOD.mask & False), "mask: no place is true"),
    "a value that is not a number": (
        replace(GOOD, values=first_set(GOOD.values, math.nan)),
        r"values: 1 non-finite values, the first at \[0, 0\]",
    ),
    "an infinite reward": (
        replace(GOOD, rewards=first_set(GOOD.rewards, math.inf)),
        r"token_rewards: 1 non-finite values, the first at \[0, 0\]",
    ),
    "an infinite bootstrap value": (
        replace(GOOD, bootstrap=first_set(GOOD.bootstrap, math.inf)),
        "bootstrap_values: 1 non-finite",
    ),
    "a reward on a tool token": (
        replace(GOOD, rewards=GOOD.rewards.fill_(0) + torch.tensor([[0.0, 0.0, 0.5]])),
        r"token_rewards: must be 0 where the mask is false, got 0.5 at \[0, 2\]",
    ),
    "an undefined reward on a tool token": (
        replace(GOOD, rewards=torch.tensor([[0.0, 0.0, math.nan]])),
        r"token_rewards: must be 0 where the mask is false, got nan at \[0, 2\]",
    ),
    "values beyond the dtype": (
        replace(GOOD, rewards=torch.full((1, 3), 3e38) * GOOD.mask, values=torch.zeros(1, 3)).to(
            torch.float32
        ),
        "token_rewards, values: too large, the result overflows torch.float32",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_arguments_are_refused_by_name(name: str) -> None:
    episodes, message = BROKEN[name]
    with pytest.raises(InputError, match=message):
        gae_of(episodes, gae_lambda=1.0)


@pytest.mark.parametrize("name", ["gamma", "gae_lambda", "length_alpha"])
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_parameters_out_of_range(name: str, value: float) -> None:
    with pytest.raises(InputError, match=name):
        gae_of(GOOD, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gamma", "gae_lambda"])
def test_factors_above_1_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"{name}: expected a number in \[0, 1\], got 1.5"):
        gae_of(GOOD, **{name: 1.5})  # type: ignore[arg-type]
