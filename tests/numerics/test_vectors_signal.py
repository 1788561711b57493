"""Golden vectors of the recipes of the update signal and the objective, through `prepare`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from correction.group_filter import keep_group
from correction.penalty_parts import PromptKl
from correction.policy_inputs import PromptInputs
from tests.numerics.golden_runs import (
    on_fixture,
    one_pass,
    prepared_from,
    prepared_with,
    recipe_of,
)
from tests.numerics.golden_vectors import DTYPES, VECTORS, assert_golden, tensor

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TO_PROX = {"proximal": "recompute"}
"""The fixture's clips are on theta/prox; these recipes take theta/mu by themselves."""
DEVIATION = {"advantage.std_epsilon": 0.0}
UNBIASED = {"advantage.std_ddof": 1}


def on_policy(
    name: str, overrides: Mapping[str, object], rewards: list[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Advantages [G] of one group, and minus the gradient [G], theta = mu = reference."""
    recipe = recipe_of(name, overrides)
    logprobs = torch.full((len(rewards), 2), -1.0, dtype=dtype)
    prepared = prepared_from(recipe, rewards, logprobs, reference_logprobs=logprobs)
    _, gradient = one_pass(recipe, prepared, logprobs, logprobs, proximal_logprobs=logprobs)
    return prepared.advantages[:, 0], -gradient[:, 0]


@both_dtypes
@pytest.mark.parametrize(
    ("name", "overrides", "row", "tokens_a_trajectory"),
    [
        ("reinforce", {}, "reinforce", 1),
        ("reinforce_baseline", {"advantage.value": 1.0}, "mean_baseline", 1),
        ("rloo", {}, "rloo", 1),
        ("dr_grpo", {}, "dr_grpo", 4),
        ("aipo", {}, "dr_grpo", 2),
        ("grpo", DEVIATION, "grpo_population_std", 2),
        ("grpo", UNBIASED, "grpo_unbiased_std_eps1e6_verl", 2),
        ("dapo", DEVIATION | {"shaping": []}, "grpo_population_std", 2),
        ("none", DEVIATION, "grpo_population_std", 2),
    ],
)
def test_recipes_on_the_seed_group(
    dtype: torch.dtype, name: str, overrides: dict[str, object], row: str, tokens_a_trajectory: int
) -> None:
    """tokens_a_trajectory: what the aggregation divides by, beside the four trajectories."""
    vector = VECTORS["ADV.seed_group"]
    advantages, ascent = on_policy(name, overrides, vector["rewards"], dtype)
    assert_golden(advantages, vector[row])
    assert_golden(4 * tokens_a_trajectory * ascent, vector[row])


@both_dtypes
@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "grpo", "tail_rl", "maxrl", "gspo", "reco"])
def test_a_group_without_variance_moves_nothing(dtype: torch.dtype, name: str) -> None:
    rewards = VECTORS["ADV.zero_variance_group"]["rewards"]
    advantages, ascent = on_policy(name, {}, rewards, dtype)
    assert advantages.tolist() == ascent.tolist() == VECTORS["ADV.zero_variance_group"]["grpo"]


@both_dtypes
def test_tail_rl(dtype: torch.dtype) -> None:
    for row in VECTORS["ADV.tailrl"].values():
        advantages, ascent = on_policy("tail_rl", {}, row["rewards"], dtype)
        assert_golden(advantages, row["adv"])
        assert_golden(2 * len(advantages) * ascent, row["adv"])
    unscaled = {"advantage.by_group_size": False}
    rewards = VECTORS["ADV.tailrl"]["seed"]["rewards"]
    assert_golden(
        on_policy("tail_rl", unscaled, rewards, dtype)[0], VECTORS["ADV.tailrl_unscaled_seed"]
    )


@both_dtypes
def test_maxrl(dtype: torch.dtype) -> None:
    row = VECTORS["ADV.tailrl"]["binary"]
    advantages, ascent = on_policy("maxrl", {}, row["rewards"], dtype)
    assert_golden(advantages, row["adv"])
    assert_golden(10 * ascent, row["adv"])


@both_dtypes
def test_grpo_on_one_turn_groups_is_pivots(dtype: torch.dtype) -> None:
    vector = VECTORS["PIVOT"]
    advantages, _ = on_policy("grpo", DEVIATION, vector["outcomes"]["s1"], dtype)
    assert_golden(advantages, vector["adv_s1"])


@both_dtypes
def test_reinforce_pp(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.reinforce_pp"]
    mask = tensor(vector["mask"]).bool()
    logprobs = torch.full(mask.shape, -1.0, dtype=dtype)
    away = logprobs - tensor(vector["kl_tokens"], dtype)
    rewards = [1.0, 0.0]

    plain = recipe_of("reinforce_pp", UNBIASED)
    verl = prepared_from(plain, rewards, logprobs, mask=mask, reference_logprobs=logprobs)
    assert_golden(verl.advantages, vector["adv_unbiased_verl"])

    penalised = recipe_of("reinforce_pp", {"penalties.kl.coefficient": vector["beta"]})
    prepared = prepared_from(penalised, rewards, logprobs, mask=mask, reference_logprobs=away)
    # The part adds 1e-8 to the variance, the vector does not.
    returns = tensor(vector["returns_with_kl"])[mask]
    variance = float(returns.var(correction=0))
    wanted = tensor(vector["adv_with_kl_population"]) * math.sqrt(variance / (variance + 1e-8))
    assert_golden(prepared.advantages, wanted)
    _, gradient = one_pass(penalised, prepared, logprobs, logprobs)
    assert_golden(-5 * gradient, wanted)


@both_dtypes
def test_reinforce_pp_spends_no_discount_on_a_tool_gap(dtype: torch.dtype) -> None:
    gap = VECTORS["ADV.reinforce_pp"]["tool_gap"]
    mask = tensor(gap["mask"]).bool()
    logprobs = torch.full(mask.shape, -1.0, dtype=dtype)
    recipe = recipe_of("reinforce_pp", {"advantage.gamma": gap["gamma"]})
    prepared = prepared_from(recipe, [1.0], logprobs, mask=mask, reference_logprobs=logprobs)
    returns = tensor(gap["returns_skip_tool"])[mask]
    white = (returns - returns.mean()) / (returns.var(correction=0) + 1e-8).sqrt()
    assert_golden(prepared.advantages[mask], white)


@both_dtypes
def test_reinforce_pp_baseline(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.reinforce_pp_baseline"]
    mask = torch.arange(2)[None] < torch.tensor(vector["lengths"])[:, None]
    logprobs = torch.full(mask.shape, -1.0, dtype=dtype)
    recipe = recipe_of("reinforce_pp_baseline", UNBIASED)
    prepared = prepared_from(
        recipe,
        vector["rewards"],
        logprobs,
        mask=mask,
        group_index=torch.tensor(vector["groups"]),
        reference_logprobs=logprobs,
    )
    assert_golden(prepared.advantages[mask], vector["token_whiten_unbiased_verl"])
    _, gradient = one_pass(recipe, prepared, logprobs, logprobs)
    assert_golden(-5 * gradient[mask], vector["token_whiten_unbiased_verl"])


@both_dtypes
@pytest.mark.parametrize("row", VECTORS["KL.estimators"]["rows"])
@pytest.mark.parametrize(
    ("name", "coefficient", "value", "slope"),
    [("grpo", 0.04, 5, 8), ("reinforce_pp_baseline", 0.01, 4, 7)],
    ids=["k3", "k2"],
)
def test_kl_in_the_loss(
    dtype: torch.dtype, name: str, coefficient: float, value: int, slope: int, row: list[float]
) -> None:
    """Columns of the table: its k3 or k2, and the derivative of it."""
    target, reference = tensor([[row[0]]], dtype).log(), tensor([[row[1]]], dtype).log()
    prepared = prepared_with(
        torch.zeros(1, dtype=dtype),
        torch.ones(1, 1, dtype=torch.bool),
        kl_coefficient=coefficient,
        reference_logprobs=reference,
    )
    objective, gradient = one_pass(recipe_of(name), prepared, target, target)
    assert_golden(objective.loss / coefficient, row[value])
    assert_golden(gradient[0, 0] / coefficient, row[slope])


@both_dtypes
def test_instructgpt(dtype: torch.dtype) -> None:
    """The reward with its penalty; what GAE makes of it is in test_recipes_truth."""
    vector = VECTORS["KL.in_reward_k1"]["instructgpt"]
    logprobs = torch.full((1, 2), -1.0, dtype=dtype)
    prepared = prepared_from(
        recipe_of("instructgpt", {"penalties.kl.coefficient": vector["beta"]}),
        [vector["r"]],
        logprobs,
        reference_logprobs=logprobs - vector["sum_log_ratio"] / 2,
        scores=logprobs,
        values=torch.zeros(1, 2, dtype=dtype),
        final_values=torch.zeros(1, dtype=dtype),
    )
    assert_golden(prepared.token_rewards.sum(), vector["R"])
    assert prepared.value_targets is not None
    # The last step's target is its own reward: the trajectory's less one token's penalty.
    assert_golden(prepared.value_targets[0, 1], vector["r"] - vector["beta"] * 0.25)


@both_dtypes
def test_fixture_under_the_aggregations_of_grpo_dr_grpo_and_dapo(dtype: torch.dtype) -> None:
    vector = VECTORS["F.ppo_clip_0.2"]
    objective, gradient = on_fixture("dr_grpo", TO_PROX, dtype)
    assert_golden(objective.loss, vector["agg"]["dr_grpo_const"])
    assert_golden(8 * gradient, vector["grad_logp"])
    objective, _ = on_fixture("grpo", TO_PROX | {"penalties": []}, dtype)
    assert_golden(objective.loss, vector["agg"]["seq_mean_token_mean"])
    objective, gradient = on_fixture("dapo", TO_PROX, dtype)
    assert_golden(objective.loss, VECTORS["F.dapo_clip_higher_.2_.28"]["token_mean"])
    assert_golden(5 * gradient, vector["grad_logp"])


@both_dtypes
def test_dapo_punishes_overlong_answers_and_filters_groups(dtype: torch.dtype) -> None:
    recipe = recipe_of("dapo", {"advantage": "return"})
    lengths, penalties = zip(*VECTORS["DAPO.overlong"], strict=True)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    logprobs = torch.full(mask.shape, -1.0, dtype=dtype)
    prepared = prepared_from(recipe, [0.0] * len(lengths), logprobs, mask=mask, limit_tokens=20480)
    assert_golden(prepared.advantages[:, 0], penalties)

    dynamic = VECTORS["DAPO.dynamic"]
    groups = [[1.0] * round(4 * share) + [0.0] * round(4 - 4 * share) for share in dynamic["acc"]]
    assert [keep_group(group, recipe.group_filter) for group in groups] == dynamic["keep"]


@both_dtypes
def test_reco(dtype: torch.dtype) -> None:
    """Weights of the group in the advantages; the variance ratio in loss and gradient."""
    vector = VECTORS["RECO_secondary"]
    recipe = recipe_of("reco", DEVIATION | {"surrogate.clip_low": 0.9})
    behaviour = tensor(vector["pi_bar"], dtype).log()[:, None]
    prepared = prepared_from(recipe, [1.0, -1.0, 1.0, -1.0], behaviour)
    signs = tensor([1.0, -1.0, 1.0, -1.0], dtype)
    assert_golden(prepared.advantages[:, 0] * signs, vector["w_clip5_meannorm"])

    one = prepared_with(torch.ones(1, dtype=dtype), torch.ones(1, 1, dtype=torch.bool))
    objective, gradient = one_pass(
        recipe, one, tensor([[vector["p"]]], dtype).log(), tensor([[vector["p_old"]]], dtype).log()
    )
    assert_golden(-objective.loss, vector["r_var"])
    assert_golden(-gradient[0, 0], vector["r_var"])


@both_dtypes
@pytest.mark.parametrize(
    ("clip", "row"), [({}, "w"), ({"penalties.prompt_kl.weight_clip": 0.0}, "w_raw")]
)
def test_erpo(dtype: torch.dtype, clip: dict[str, object], row: str) -> None:
    """Three prompts of two answers, weighed by their surprise; the paper's bound or the code's."""
    vector = VECTORS["ERPO"]
    recipe = recipe_of("erpo", DEVIATION | clip)
    behaviour = torch.full((6, 2), -1.0, dtype=dtype)
    prepared = prepared_from(
        recipe,
        [1.0, 0.0] * 3,
        behaviour,
        group_index=torch.tensor([4, 4, 2, 2, 8, 8]),
        reference_logprobs=behaviour,
        prompt_nll=tensor(vector["s"], dtype).repeat_interleave(2),
    )
    assert_golden(prepared.advantages[::2, 0], vector[row])

    asked = torch.ones(6, 2, dtype=torch.bool) & (torch.arange(6)[:, None] == 0)
    prompt = PromptInputs(
        tensor([vector["prompt_logp_theta"]] * 6, dtype),
        tensor([vector["prompt_logp_ref"]] * 6, dtype),
        asked,
    )
    objective, _ = one_pass(recipe, prepared, behaviour, behaviour, prompt=prompt, prompt_tokens=2)
    penalty = recipe.penalty_of(PromptKl)
    assert penalty is not None
    assert penalty.coefficient == vector["alpha"]
    assert_golden(objective.sums["loss_prompt_kl"].to(dtype), vector["reg"])
    assert_golden(objective.sums["loss_prompt_kl"].to(dtype) / 0.01, vector["k3_mean"])


@both_dtypes
def test_srpo(dtype: torch.dtype) -> None:
    vector = VECTORS["SRPO"]
    behaviour = tensor([vector["logp_old"]], dtype)
    versions = torch.zeros(1, 3, dtype=torch.int64)
    recipe = recipe_of("srpo")
    prepared = prepared_from(
        recipe,
        [1.0],
        behaviour,
        teacher_logprobs=tensor([vector["logp_teacher"]], dtype),
        teacher_versions=versions,
        behaviour_versions=versions,
    )
    assert_golden(prepared.advantages[0], vector["A"])
    _, gradient = one_pass(recipe, prepared, behaviour, behaviour)
    assert_golden(-3 * gradient[0], vector["A"])


@both_dtypes
def test_arpo(dtype: torch.dtype) -> None:
    """Two branches among four: the other rewards make the group's mean 0 and its deviation 1."""
    vector = VECTORS["ARPO"]["hard_adv"]
    half = math.sqrt(0.8**2 + 4 * 0.88)
    rewards = [*vector["branch_adv"], (-0.8 + half) / 2, (-0.8 - half) / 2]
    behaviour = torch.full((4, 2), -1.0, dtype=dtype)
    recipe = recipe_of("arpo", DEVIATION)
    prepared = prepared_from(
        recipe,
        rewards,
        behaviour,
        segment_ids=torch.tensor([[3, -1], [3, -1], [-1, -1], [-1, -1]]),
    )
    _, gradient = one_pass(recipe, prepared, behaviour, behaviour)
    for numbers in (prepared.advantages, -8 * gradient):
        assert_golden(numbers[:2, 0], [vector["shared_prefix"]] * 2)
        assert_golden(numbers[:2, 1], vector["own_suffix"])


@both_dtypes
def test_dagger(dtype: torch.dtype) -> None:
    vector = VECTORS["DAGGER"]["loss"]
    target = tensor([vector["p_expert_action"]], dtype).log()
    recipe = recipe_of("dagger")
    behaviour = torch.full((1, 2), -9.0, dtype=dtype)  # no ratio to it means anything
    prepared = prepared_from(recipe, [0.0], behaviour)
    objective, gradient = one_pass(recipe, prepared, target, behaviour)
    assert_golden(objective.loss, vector["ce"])
    assert_golden(gradient[0], [-0.5, -0.5])
