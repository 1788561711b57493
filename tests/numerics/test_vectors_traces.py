"""Golden vectors of what needs a critic: GAE and V-trace, per token and per turn."""

from __future__ import annotations

import math

import pytest
import torch

from correction.gae import gae
from correction.ratios import Level, log_ratio
from correction.steps import StepUnit
from correction.token_advantages import terminal_rewards
from correction.vtrace import TraceBounds, VtraceEstimate, trace_steps, vtrace
from tests.numerics.golden_vectors import DTYPES, VECTORS, assert_golden, tensor

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
RLAX_DISCOUNTS = [[0.0, 0.89, 0.85, 0.99], [0.88, 1.0, 0.83, 0.95]]
RLAX_REWARDS = [[-1.3, -1.3, 2.3, 42.0], [1.3, 5.3, -3.3, -5.0]]
RLAX_VALUES = [[2.1, 1.1, -3.1, 0.0], [3.1, 0.1, -1.1, 7.4]]
RLAX_BOOTSTRAP = [8.4, -1.2]


@both_dtypes
def test_gae(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.gae"]
    mask, turns = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.int64)
    rewards, values = tensor([vector["rewards"]], dtype), tensor([vector["values"]], dtype)
    for gamma, name in ((1.0, "adv"), (0.99, "adv_gamma099")):
        estimate = gae(
            rewards,
            values,
            torch.zeros(1),
            mask,
            turns,
            gamma=gamma,
            gae_lambda=vector["lam"],
            unit=StepUnit.TOKEN,
        )
        assert_golden(estimate.advantages[0], vector[name])
        if gamma == 1.0:
            assert_golden(estimate.value_targets[0], vector["returns"])


@both_dtypes
def test_gae_skips_a_tool_gap(dtype: torch.dtype) -> None:
    estimate = gae(
        tensor([[0.0, 0, 0, 1]], dtype),
        tensor([[0.5, 0.4, 99, 0.6]], dtype),
        torch.zeros(1),
        torch.tensor([[1, 1, 0, 1]]).bool(),
        torch.zeros(1, 4, dtype=torch.int64),
        gamma=1.0,
        gae_lambda=0.95,
        unit=StepUnit.TOKEN,
    )

    first, second, third = VECTORS["ADV.gae"]["adv"]
    assert_golden(estimate.advantages[0], [first, second, 0.0, third])


@both_dtypes
def test_gae_of_turns(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.gae_turn"]
    estimate = gae(
        tensor([vector["rewards"]], dtype),
        tensor([vector["values"]], dtype),
        torch.zeros(1),
        torch.tensor([vector["mask"]]).bool(),
        torch.tensor([vector["turn_ids"]]),
        gamma=vector["gamma"],
        gae_lambda=vector["lam"],
        unit=StepUnit.TURN,
    )

    assert_golden(estimate.advantages[0], vector["adv"])
    assert_golden(estimate.value_targets[0], [target or 0.0 for target in vector["returns"]])


def by_hand(dtype: torch.dtype, boot: float = 0.0, **changes: float) -> VtraceEstimate:
    """V-trace of the hand-computed trajectory."""
    vector = VECTORS["VTRACE.hand"]
    return vtrace(
        tensor([vector["rho"]], dtype).log(),
        tensor([vector["r"]], dtype),
        tensor([vector["V"]], dtype),
        tensor([boot], dtype),
        torch.ones(1, 3, dtype=torch.bool),
        torch.zeros(1, 3, dtype=torch.int64),
        unit=StepUnit.TOKEN,
        **{"gamma": 1.0, **changes},  # type: ignore[arg-type]
    )


@both_dtypes
def test_vtrace_by_hand(dtype: torch.dtype) -> None:
    vector = VECTORS["VTRACE.hand"]
    cases = {
        "gamma09_boot03": by_hand(dtype, boot=0.3, gamma=0.9),
        "rhobar_pgbar_1_5": by_hand(dtype, rho_bar=1.5, pg_rho_bar=1.5),
        "lambda09": by_hand(dtype, trace_lambda=0.9),
    }
    for name, estimate in cases.items():
        assert_golden(estimate.value_targets[0], vector[name]["vs"])
        assert_golden(estimate.advantages[0], vector[name]["pg"])
    plain = by_hand(dtype)
    assert_golden(plain.value_targets[0], vector["vs"])
    assert_golden(plain.advantages[0], vector["pg_adv"])
    assert_golden(plain.ratios[0], vector["rho"])
    assert_golden(plain.rho[0], [1.0, 0.5, 1.0])


def vtrace_of(
    log_ratios: object, rewards: object, values: object, dtype: torch.dtype
) -> VtraceEstimate:
    """One terminated trajectory without a gap, all bars 1."""
    logs = tensor([log_ratios], dtype)
    return vtrace(
        logs,
        tensor([rewards], dtype),
        tensor([values], dtype),
        torch.zeros(1),
        torch.ones(logs.shape, dtype=torch.bool),
        torch.zeros(logs.shape, dtype=torch.int64),
        gamma=1.0,
        unit=StepUnit.TOKEN,
    )


@both_dtypes
def test_vtrace_on_policy_and_with_a_constant_for_a_critic(dtype: torch.dtype) -> None:
    vector = VECTORS["VTRACE.hand"]
    on_policy, constant = vector["on_policy"], vector["constant_baseline"]

    equal = vtrace_of([0.0] * 3, vector["r"], vector["V"], dtype)
    assert_golden(equal.value_targets[0], on_policy["vs"])
    assert_golden(equal.advantages[0], on_policy["pg"])

    logs = tensor(vector["rho"], dtype).log().tolist()
    flat = vtrace_of(logs, vector["r"], [constant["b"]] * 3, dtype)
    assert_golden(flat.value_targets[0], constant["vs"])
    assert_golden(flat.advantages[0], constant["pg"])
    assert_golden(flat.advantages[0] / (1 - constant["b"]), constant["suffix_products"])


@both_dtypes
def test_vtrace_skips_a_tool_gap_once_its_reward_is_where_it_belongs(dtype: torch.dtype) -> None:
    vector = VECTORS["VTRACE.hand"]
    gap = vector["tool_gap_input"]
    mask = torch.tensor([gap["mask"]]).bool()

    estimate = vtrace(
        tensor([gap["rho"]], dtype).log(),
        tensor([gap["r"]], dtype) * mask,
        tensor([gap["V"]], dtype),
        torch.zeros(1),
        mask,
        torch.zeros(1, 4, dtype=torch.int64),
        gamma=1.0,
        unit=StepUnit.TOKEN,
    )

    assert_golden(estimate.value_targets[mask], vector["vs"])
    assert_golden(estimate.advantages[mask], vector["pg_adv"])


@both_dtypes
@pytest.mark.parametrize("name", ["token", "turn_product", "turn_geometric"])
def test_vtrace_of_tokens_and_of_turns(dtype: torch.dtype, name: str) -> None:
    vector = VECTORS["VTRACE.token_vs_turn_group_baseline"]
    unit = StepUnit.TOKEN if name == "token" else StepUnit.TURN
    mask = torch.ones(1, 5, dtype=torch.bool)

    estimate = vtrace(
        tensor([vector["log_ratio"]], dtype),
        terminal_rewards(tensor([vector["R"]], dtype), mask),
        torch.full((1, 5), vector["b"], dtype=dtype),
        torch.zeros(1),
        mask,
        torch.tensor([vector["turn"]]),
        gamma=1.0,
        unit=unit,
        turn_level=Level.TURN_GEOMETRIC if name == "token" else Level(name),
    )

    wanted = vector["pg"][name]
    by_token = wanted if name == "token" else [wanted[turn] for turn in vector["turn"]]
    assert_golden(estimate.advantages[0], by_token)


@both_dtypes
def test_credit_of_early_tokens_decays_with_a_constant_for_a_critic(dtype: torch.dtype) -> None:
    for length, weight in VECTORS["VTRACE.decay"]["N"].items():
        count = int(length)
        logs = [math.log(1.1), math.log(0.9)] * (count // 2)
        rewards = [0.0] * (count - 1) + [1.0]
        first = vtrace_of(logs, rewards, [0.0] * count, dtype).advantages[0, 0]
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4  # of 1000 rounded logs
        assert float(first) == pytest.approx(weight, rel=tolerance)


@both_dtypes
def test_vtrace_equals_rlax_with_a_discount_of_each_step(dtype: torch.dtype) -> None:
    vector = VECTORS["VTRACE.rlax_golden"]
    values, bootstrap = tensor(RLAX_VALUES, dtype), tensor(RLAX_BOOTSTRAP, dtype)

    targets, advantages = trace_steps(
        tensor(vector["log_rhos"], dtype).exp(),
        tensor(RLAX_REWARDS, dtype),
        tensor(RLAX_DISCOUNTS, dtype),
        values,
        torch.cat([values[:, 1:], bootstrap[:, None]], dim=1),
        TraceBounds(),
    )

    assert_golden(targets, vector["vs"])
    assert_golden(targets - values, vector["errors"])
    assert_golden(advantages, vector["pg"])


def test_ratios_of_the_rlax_case_are_those_of_its_logits() -> None:
    target = tensor([[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]]]).log_softmax(-1)
    behaviour = tensor([[[8.9, 0.7], [5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]]]).log_softmax(-1)
    actions = torch.tensor([[[0], [1], [0], [0]]])

    logs = log_ratio(
        target.gather(2, actions)[..., 0],
        behaviour.gather(2, actions)[..., 0],
        torch.ones(1, 4, dtype=torch.bool),
    )

    torch.testing.assert_close(
        logs[0], tensor(VECTORS["VTRACE.rlax_golden"]["log_rhos"][0]), rtol=0, atol=1e-6
    )
