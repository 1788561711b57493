"""Golden vectors of KL penalties, the prompt penalty, the value loss and reward shaping."""

from __future__ import annotations

import pytest
import torch

from correction.penalties import (
    KlEstimator,
    adaptive_coefficient,
    kl_penalty,
    kl_token_rewards,
)
from correction.prompt_penalty import prompt_kl, prompt_weights
from correction.shaping import overlong_penalty
from correction.value_loss import value_loss
from tests.numerics.golden_vectors import DTYPES, VECTORS, assert_golden, tensor

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ONE_TOKEN = torch.ones(1, 1, dtype=torch.bool)
VALUE_AND_SLOPE = {
    KlEstimator.K1: ("k1", "dk1"),
    KlEstimator.K2: ("k2", "dk2"),
    KlEstimator.K3: ("k3", "dk3"),
    KlEstimator.K3_PLUS: ("k3", "dk2"),
}


@both_dtypes
@pytest.mark.parametrize("estimator", KlEstimator)
def test_kl_estimators(dtype: torch.dtype, estimator: KlEstimator) -> None:
    vector = VECTORS["KL.estimators"]
    for numbers in vector["rows"]:
        row = dict(zip(vector["cols"], numbers, strict=True))
        target = tensor([[row["p_theta"]]], dtype).log().requires_grad_()
        reference = tensor([[row["p_ref"]]], dtype).log()

        penalty = kl_penalty(target, reference, ONE_TOKEN, estimator)
        (slope,) = torch.autograd.grad(penalty.sum(), target)

        value_name, slope_name = VALUE_AND_SLOPE[estimator]
        assert_golden(penalty[0, 0], row[value_name])
        assert_golden(slope[0, 0], row[slope_name])


@both_dtypes
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_mean_of_each_estimator(dtype: torch.dtype, estimator: str) -> None:
    exact = VECTORS["KL.estimators"]["exact"]
    probabilities = tensor([exact["P"]], dtype)
    everything = torch.ones(1, 3, dtype=torch.bool)

    penalty = kl_penalty(
        probabilities.log(), tensor([exact["Q"]], dtype).log(), everything, KlEstimator(estimator)
    )

    assert_golden((probabilities * penalty).sum(), exact[f"E_{estimator}"])


@both_dtypes
@pytest.mark.parametrize("estimator", KlEstimator)
def test_expected_gradient_of_each_estimator_as_a_loss(
    dtype: torch.dtype, estimator: KlEstimator
) -> None:
    vector = VECTORS["KL.expected_gradient_of_loss_wrt_logits"]
    exact = VECTORS["KL.estimators"]["exact"]
    logits = tensor([exact["P"]], dtype).log().requires_grad_()

    penalty = kl_penalty(
        logits.log_softmax(dim=-1),
        tensor([exact["Q"]], dtype).log(),
        torch.ones(1, 3, dtype=torch.bool),
        estimator,
    )
    sampled = tensor([exact["P"]], dtype)  # how often each token comes: no path for the gradient
    (gradient,) = torch.autograd.grad((sampled * penalty).sum(), logits)

    name = "k2_loss" if estimator is KlEstimator.K3_PLUS else f"{estimator.value}_loss"
    assert_golden(gradient[0], vector[name])
    if name == "k2_loss":
        assert_golden(gradient[0], vector["true"])


@both_dtypes
def test_kl_reweighted_for_another_sampler(dtype: torch.dtype) -> None:
    vector = VECTORS["KL.unbiased_v32"]
    theta, reference = tensor([[0.5]], dtype).log(), tensor([[0.25]], dtype).log()
    importance = tensor([[vector["ratio_theta_old"]]], dtype).log()

    penalty = kl_penalty(theta, reference, ONE_TOKEN, KlEstimator.K3, log_importance=importance)

    assert_golden(kl_penalty(theta, reference, ONE_TOKEN, KlEstimator.K3)[0, 0], vector["k3"])
    assert_golden(penalty[0, 0], vector["value"])


@both_dtypes
def test_kl_in_the_reward(dtype: torch.dtype) -> None:
    vector = VECTORS["KL.in_reward_k1"]
    away = tensor([vector["log_ratio"]], dtype)
    reference = torch.full_like(away, -2.0)
    mask = torch.ones_like(away, dtype=torch.bool)

    rewards = kl_token_rewards(reference + away, reference, mask, coefficient=vector["beta"])
    rewards[0, -1] += vector["score"]

    assert_golden(rewards[0], vector["token_rewards"])


@both_dtypes
def test_kl_in_the_reward_of_instructgpt(dtype: torch.dtype) -> None:
    vector = VECTORS["KL.in_reward_k1"]["instructgpt"]
    away = tensor([[0.75, -0.25]], dtype)
    assert float(away.sum()) == vector["sum_log_ratio"]
    reference = torch.full_like(away, -2.0)
    mask = torch.ones_like(away, dtype=torch.bool)

    rewards = kl_token_rewards(reference + away, reference, mask, coefficient=vector["beta"])

    assert_golden(vector["r"] + rewards.sum(), vector["R"])


def test_adaptive_coefficient() -> None:
    vector = VECTORS["KL.adaptive"]

    adapted = adaptive_coefficient(
        vector["init"],
        vector["current"],
        target=vector["target"],
        horizon=vector["horizon"],
        n=vector["n"],
    )

    assert adapted == pytest.approx(vector["new"], rel=1e-12)
    assert adapted == pytest.approx(vector["hand"], rel=1e-12)


@both_dtypes
def test_prompt_penalty(dtype: torch.dtype) -> None:
    vector = VECTORS["ERPO"]
    target = tensor([vector["prompt_logp_theta"]], dtype).requires_grad_()
    reference = tensor([vector["prompt_logp_ref"]], dtype)

    penalty = prompt_kl(target, reference, torch.ones(1, 2, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(penalty.sum(), target)

    assert_golden(penalty[0], vector["k3_tokens"])
    assert_golden(penalty.mean() * vector["alpha"], vector["reg"])
    assert_golden(gradient, 1.0 - (reference - target.detach()).exp())


@both_dtypes
def test_prompt_weights(dtype: torch.dtype) -> None:
    vector = VECTORS["ERPO"]
    assert_golden(prompt_weights(tensor(vector["s"], dtype), clip=2.0), vector["w"])
    assert_golden(prompt_weights(tensor(vector["s"], dtype), clip=None), vector["w_raw"])


@both_dtypes
def test_clipped_value_loss(dtype: torch.dtype) -> None:
    vector = VECTORS["LOSS.value_clip"]
    values = tensor([[vector["vpred"]]], dtype).requires_grad_()

    result = value_loss(
        values,
        tensor([[vector["ret"]]], dtype),
        ONE_TOKEN,
        old_values=tensor([[vector["vold"]]], dtype),
        clip=vector["clip"],
    )
    (gradient,) = torch.autograd.grad(result.losses.sum(), values)

    assert_golden(result.losses[0, 0], vector["loss"])
    assert bool(result.clipped)
    assert float(gradient) == 0.0


def test_overlong_penalty() -> None:
    lengths, expected = zip(*VECTORS["DAPO.overlong"], strict=True)
    penalty = overlong_penalty(torch.tensor(lengths), max_tokens=20480, cache_tokens=4096)
    assert_golden(penalty, list(expected))
