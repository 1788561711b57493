"""Golden vectors of the recipes with values or heads: V-trace, IMPALA, PPO, Score Centering."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from correction.objective import Objective, PolicyInputs, policy_objective
from tests.numerics.golden_runs import (
    LIMIT_TOKENS,
    one_pass,
    prepared_from,
    prepared_with,
    recipe_of,
)
from tests.numerics.golden_vectors import DTYPES, VECTORS, assert_golden, tensor

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@both_dtypes
@pytest.mark.parametrize("level", ["token", "turn_product", "turn_geometric"])
def test_vtrace(dtype: torch.dtype, level: str) -> None:
    """The sibling's reward is the constant V; its own row is not looked at."""
    vector = VECTORS["VTRACE.token_vs_turn_group_baseline"]
    unit = {"advantage.unit": "token"} if level == "token" else {"advantage.turn_level": level}
    recipe = recipe_of("vtrace", unit)
    behaviour = torch.full((2, 5), -3.0, dtype=dtype)
    target = behaviour + tensor([vector["log_ratio"], [0.0] * 5], dtype)
    turns = torch.tensor([vector["turn"]] * 2)
    prepared = prepared_from(recipe, [vector["R"], vector["b"]], behaviour, turn_ids=turns)

    _, gradient = one_pass(recipe, prepared, target, behaviour, turn_ids=turns)

    wanted = vector["pg"][level]
    by_token = wanted if level == "token" else [wanted[turn] for turn in vector["turn"]]
    assert_golden(-10 * gradient[0], by_token)


def impala(
    overrides: dict[str, object], boot: float, dtype: torch.dtype
) -> tuple[Objective, Tensor, Tensor]:
    """IMPALA on the hand-computed trajectory, and its gradients in theta and in the values."""
    vector = VECTORS["VTRACE.hand"]
    recipe = recipe_of("impala", overrides)
    behaviour = torch.full((1, 3), -3.0, dtype=dtype)
    target = behaviour + tensor([vector["rho"]], dtype).log()
    values = tensor([vector["V"]], dtype).requires_grad_()
    cut = torch.tensor([boot != 0.0])
    prepared = prepared_from(recipe, [sum(vector["r"])], behaviour, truncated=cut)

    objective, gradient = one_pass(
        recipe,
        prepared,
        target,
        behaviour,
        values=values,
        final_values=tensor([boot], dtype),
        entropy=torch.full((1, 3), 0.5, dtype=dtype),
    )
    (of_values,) = torch.autograd.grad(objective.loss, values)
    return objective, gradient[0], of_values[0]


@both_dtypes
@pytest.mark.parametrize(
    ("overrides", "boot", "case", "advantages"),
    [
        ({}, 0.0, None, "pg_adv"),
        ({"advantage.gamma": 0.9}, 0.3, "gamma09_boot03", "pg"),
        (
            {"advantage.rho_bar": 1.5, "advantage.pg_rho_bar": 1.5},
            0.0,
            "rhobar_pgbar_1_5",
            "pg",
        ),
        ({"advantage.trace_lambda": 0.9}, 0.0, "lambda09", "pg"),
    ],
)
def test_impala(
    dtype: torch.dtype, overrides: dict[str, object], boot: float, case: str | None, advantages: str
) -> None:
    hand = VECTORS["VTRACE.hand"]
    vector = hand[case] if case else hand

    objective, of_theta, of_values = impala(overrides, boot, dtype)

    assert_golden(-3 * of_theta, vector[advantages])
    # The critic's loss is 1/2 x 1/2 (V - target)^2, a mean over tokens.
    error = tensor(hand["V"], dtype) - tensor(vector["vs"], dtype)
    assert_golden(6 * of_values, error)
    assert_golden(objective.sums["loss_critic"].to(dtype), float(error.square().mean() / 4))
    assert_golden(objective.sums["loss_entropy"].to(dtype), -1e-3 * 0.5)


def generalised(
    overrides: dict[str, object], dtype: torch.dtype, gap: bool = False
) -> tuple[Tensor, Tensor | None]:
    """PPO's advantages and value targets of the vector's trajectory, with a tool's token or not."""
    vector = VECTORS["ADV.gae"]
    values = tensor([vector["values"]], dtype)
    mask = torch.ones(1, 3, dtype=torch.bool)
    if gap:
        values = torch.cat([values[:, :2], tensor([[99.0]], dtype), values[:, 2:]], dim=1)
        mask = torch.tensor([[True, True, False, True]])
    behaviour = torch.full(values.shape, -1.0, dtype=dtype)
    prepared = prepared_from(
        recipe_of("ppo", overrides),
        [sum(vector["rewards"])],
        behaviour,
        mask=mask,
        scores=behaviour,
        values=values,
        final_values=torch.ones(1, dtype=dtype),
    )
    targets = prepared.value_targets
    return prepared.advantages[mask], None if targets is None else targets[mask]


@both_dtypes
def test_ppo(dtype: torch.dtype) -> None:
    vector = VECTORS["ADV.gae"]
    for gap in (False, True):
        advantages, targets = generalised({}, dtype, gap)
        assert_golden(advantages, vector["adv"])
        assert targets is not None
        assert_golden(targets, vector["returns"])
    discounted, _ = generalised({"advantage.gamma": 0.99}, dtype)
    assert_golden(discounted, vector["adv_gamma099"])


@both_dtypes
def test_ppo_clips_its_values(dtype: torch.dtype) -> None:
    vector = VECTORS["LOSS.value_clip"]
    recipe = recipe_of("ppo")
    behaviour = tensor([[-1.0]], dtype)
    prepared = prepared_from(
        recipe,
        [vector["ret"]],
        behaviour,
        scores=behaviour,
        values=tensor([[vector["vold"]]], dtype),
        final_values=torch.zeros(1, dtype=dtype),
    )

    objective, gradient = one_pass(
        recipe, prepared, behaviour, behaviour, values=tensor([[vector["vpred"]]], dtype)
    )

    assert recipe.parts["critic"].clip == vector["clip"]  # type: ignore[union-attr]
    assert_golden(objective.sums["loss_critic"].to(dtype), 0.5 * vector["loss"])
    assert_golden(-gradient[0, 0], vector["ret"] - vector["vold"])


def centred(vector: dict[str, Any], weight: str, logits: Tensor) -> Tensor:
    """Loss of the recipe for one token, whose logprobs and head come from logits."""
    logprobs = logits.log_softmax(dim=-1)
    behaviour = tensor(vector["q"], logits.dtype).log()
    head, chosen = vector["H"], vector["y"]
    recipe = recipe_of("score_centering", {"surrogate.weight": weight, "surrogate.head": 2})
    place = torch.zeros(1, 1, dtype=torch.int64)
    prepared = prepared_with(tensor([vector["A"]], logits.dtype), place == 0)
    inputs = PolicyInputs(
        target_logprobs=logprobs[chosen].view(1, 1),
        behaviour_logprobs=behaviour[chosen].view(1, 1),
        lag_versions=place,
        turn_ids=place,
        head_target_logprobs=logprobs[head].view(1, 1, -1),
        head_behaviour_logprobs=behaviour[head].view(1, 1, -1),
    )
    return policy_objective(recipe, inputs, prepared, prepared.denominators(LIMIT_TOKENS)).loss


@both_dtypes
@pytest.mark.parametrize(("name", "weight"), [("sc_only", "none"), ("tis_sc_C2", "truncate")])
def test_score_centering(dtype: torch.dtype, name: str, weight: str) -> None:
    vector = VECTORS["SC"][name]
    logits = tensor(vector["p"], dtype).log().requires_grad_()

    loss = centred(vector, weight, logits)
    (gradient,) = torch.autograd.grad(loss, logits)

    assert_golden(loss, vector["loss"])
    assert_golden(gradient, vector["grad_logits"])


@both_dtypes
def test_score_centering_takes_the_drift_away_from_a_constant_advantage(dtype: torch.dtype) -> None:
    """The mean over mu of the update; without the centring it is not 0."""
    vector = VECTORS["SC"]["tis_sc_C2"]
    mean, uncentred = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    for chosen, probability in enumerate(vector["q"]):
        logits = tensor(vector["p"], dtype).log().requires_grad_()
        (gradient,) = torch.autograd.grad(
            centred(vector | {"y": chosen, "A": 1.0}, "truncate", logits), logits
        )
        mean += probability * gradient
        logprobs = logits.log_softmax(dim=-1)[chosen].view(1, 1)
        behaviour = tensor([[vector["q"][chosen]]], dtype).log()
        one = prepared_with(torch.ones(1, dtype=dtype), torch.ones(1, 1, dtype=torch.bool))
        aipo = recipe_of("aipo", {"weight.high": 2.0})
        _, of_logprob = one_pass(aipo, one, logprobs, behaviour)
        (plain,) = torch.autograd.grad(logprobs.sum() * of_logprob.sum(), logits)
        uncentred += probability * plain

    assert_golden(mean, VECTORS["SC"]["mean_update_centred"])
    assert_golden(mean, VECTORS["SC"]["mean_update_topk_head"])
    assert_golden(uncentred, VECTORS["SC"]["mean_update_uncentred_TIS_const_A1"])
