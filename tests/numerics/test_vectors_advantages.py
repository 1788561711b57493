"""Golden vectors of the advantages: of groups and of tokens."""

from __future__ import annotations

import pytest
import torch

from correction.advantages import (
    baseline_advantages,
    dr_grpo_advantages,
    grpo_advantages,
    return_advantages,
    rloo_advantages,
)
from correction.optimal_baseline import opob_advantages
from correction.tail_advantages import maxrl_advantages, tail_advantages
from correction.token_advantages import (
    WhitenUnit,
    discounted_returns,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    shared_prefix_advantages,
    teacher_advantages,
    terminal_rewards,
)
from tests.numerics.golden_vectors import DTYPES, VECTORS, assert_golden, tensor

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


@both_dtypes
def test_advantages_of_the_seed_group(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.seed_group"]
    rewards = tensor(vector["rewards"], dtype)

    assert_golden(return_advantages(rewards), vector["reinforce"])
    assert_golden(baseline_advantages(rewards, baseline=1.0), vector["mean_baseline"])
    assert_golden(rloo_advantages(rewards, ONE_GROUP), vector["rloo"])
    assert_golden(dr_grpo_advantages(rewards, ONE_GROUP), vector["dr_grpo"])
    population = grpo_advantages(rewards, ONE_GROUP, std_ddof=0, std_epsilon=0.0)
    assert_golden(population, vector["grpo_population_std"])
    unbiased = grpo_advantages(rewards, ONE_GROUP, std_ddof=1, std_epsilon=1e-6)
    assert_golden(unbiased, vector["grpo_unbiased_std_eps1e6_verl"])


@both_dtypes
def test_advantages_of_a_group_without_variance(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.zero_variance_group"]
    rewards = tensor(vector["rewards"], dtype)

    assert rloo_advantages(rewards, ONE_GROUP).tolist() == vector["rloo"]
    assert dr_grpo_advantages(rewards, ONE_GROUP).tolist() == vector["dr_grpo"]
    assert grpo_advantages(rewards, ONE_GROUP, std_epsilon=0.0).tolist() == vector["grpo"]


@both_dtypes
def test_pivot_group_has_unit_advantages(dtype: torch.dtype) -> None:
    vector = VECTORS["PIVOT"]
    rewards = tensor(vector["outcomes"]["s1"], dtype)

    assert_golden(grpo_advantages(rewards, ONE_GROUP, std_epsilon=0.0), vector["adv_s1"])


@both_dtypes
def test_tail_advantages(dtype: torch.dtype) -> None:
    for row in VECTORS["ADV.tailrl"].values():
        rewards = tensor(row["rewards"], dtype)
        group = torch.zeros(len(rewards), dtype=torch.int64)
        assert_golden(tail_advantages(rewards, group), row["adv"])
    unscaled = tail_advantages(
        tensor([0.0, 0.0, 1.0, 3.0], dtype), ONE_GROUP, scale_by_group_size=False
    )
    assert_golden(unscaled, VECTORS["ADV.tailrl_unscaled_seed"])


@both_dtypes
def test_maxrl_is_the_binary_row_of_the_tail(dtype: torch.dtype) -> None:
    row = VECTORS["ADV.tailrl"]["binary"]
    rewards = tensor(row["rewards"], dtype)

    assert_golden(maxrl_advantages(rewards, torch.zeros(5, dtype=torch.int64)), row["adv"])


@both_dtypes
def test_optimal_baseline(dtype: torch.dtype) -> None:
    weights, vector = VECTORS["IS.ess_vcpo"]["w"], VECTORS["IS.ess_vcpo"]["opob"]
    rewards, norms = tensor(vector["R"], dtype), tensor(vector["grad_norm"], dtype)

    advantages = opob_advantages(rewards, ONE_GROUP, tensor(weights, dtype), norms.square())

    assert_golden(rewards - advantages, [vector["baseline"]] * 4)


@both_dtypes
def test_reinforce_pp(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.reinforce_pp"]
    mask, rewards = tensor(vector["mask"]).bool(), tensor(vector["rewards"], dtype)
    plain = {"adv_population": (0, 0.0), "adv_unbiased_verl": (1, 1e-8)}
    for name, (ddof, epsilon) in plain.items():
        advantages = reinforce_pp_advantages(
            rewards, mask, gamma=1.0, std_ddof=ddof, variance_epsilon=epsilon
        )
        assert_golden(advantages, vector[name])

    penalised = rewards - vector["beta"] * tensor(vector["kl_tokens"], dtype)
    assert_golden(discounted_returns(penalised, mask, gamma=1.0), vector["returns_with_kl"])
    whitened = reinforce_pp_advantages(penalised, mask, gamma=1.0, std_ddof=0, variance_epsilon=0.0)
    assert_golden(whitened, vector["adv_with_kl_population"])


@both_dtypes
def test_returns_skip_a_tool_gap(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.reinforce_pp"]["tool_gap"]
    mask = tensor(vector["mask"]).bool()
    rewards = terminal_rewards(tensor([1.0], dtype), mask)

    assert_golden(rewards, vector["rewards"])
    returns = discounted_returns(rewards, mask, gamma=vector["gamma"])
    assert_golden(returns, vector["returns_skip_tool"])


@both_dtypes
def test_reinforce_pp_baseline(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.reinforce_pp_baseline"]
    mask = torch.arange(2)[None] < torch.tensor(vector["lengths"])[:, None]
    rewards, groups = tensor(vector["rewards"], dtype), torch.tensor(vector["groups"])
    by_token = {"token_whiten_population": (0, 0.0), "token_whiten_unbiased_verl": (1, 1e-8)}
    for name, (ddof, epsilon) in by_token.items():
        advantages = reinforce_pp_baseline_advantages(
            rewards,
            groups,
            mask,
            unit=WhitenUnit.TOKEN,
            recenter=True,
            std_ddof=ddof,
            variance_epsilon=epsilon,
        )
        assert_golden(advantages[mask], vector[name])

    by_trajectory = reinforce_pp_baseline_advantages(
        rewards,
        groups,
        mask,
        unit=WhitenUnit.TRAJECTORY,
        recenter=False,
        std_ddof=0,
        variance_epsilon=0.0,
    )
    assert_golden(by_trajectory[:, 0], vector["sample_whiten_population"])


@both_dtypes
def test_teacher_advantages(dtype: torch.dtype) -> None:
    vector = VECTORS["SRPO"]
    teacher, old = tensor([vector["logp_teacher"]], dtype), tensor([vector["logp_old"]], dtype)

    advantages = teacher_advantages(teacher, old, torch.ones(1, 3, dtype=torch.bool))

    assert_golden(advantages[0], vector["A"])


@both_dtypes
def test_a_shared_prefix_has_the_mean_of_its_branches(dtype: torch.dtype) -> None:
    vector = VECTORS["ARPO"]["hard_adv"]

    advantages = shared_prefix_advantages(
        tensor(vector["branch_adv"], dtype),
        torch.ones(2, 2, dtype=torch.bool),
        torch.tensor([[3, -1], [3, -1]]),
    )

    assert_golden(advantages[:, 0], [vector["shared_prefix"]] * 2)
    assert_golden(advantages[:, 1], vector["own_suffix"])
