"""Golden vectors of CISPO, SAPO, cross-entropy, DPPO, Score Centering, ReCo; value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from correction.penalties import log_ratio_square
from correction.ratios import log_ratio, to_ratio
from correction.reco import reco_clip, reco_weights
from correction.score_centering import CenteredWeight, ScoreCentered, score_centered
from correction.surrogates import cispo, cross_entropy, ppo_clip, reinforce, sapo
from tests.numerics.golden_vectors import (
    DTYPES,
    PRIME_RL_GRADIENT,
    PRIME_RL_ROWS,
    VECTORS,
    FixtureF,
    assert_golden,
    tensor,
)

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def filled(f: FixtureF) -> tuple[Tensor, Tensor]:
    """Target logprobs with gradient, and their log ratio to the proximal policy."""
    target = torch.where(f.mask, f.target, 0.0).requires_grad_()
    return target, log_ratio(target, f.proximal, f.mask)


@both_dtypes
def test_cispo(dtype: torch.dtype) -> None:
    f, vector = FixtureF(dtype), VECTORS["F.cispo_lo1_hi0.5"]
    target, logs = filled(f)

    token = cispo(logs, target, f.advantages[:, None], clip_low=1.0, clip_high=0.5)
    (gradient,) = torch.autograd.grad((token.losses * f.mask).sum(), target)

    assert_golden(token.losses * f.mask, vector["loss_tok"])
    assert_golden(gradient, vector["grad_logp"])
    assert_golden((token.losses * f.mask).sum() / f.mask.sum(), vector["token_mean"])


@both_dtypes
def test_sapo(dtype: torch.dtype) -> None:
    f, vector = FixtureF(dtype), VECTORS["F.sapo_tau1_1.05"]
    _, logs = filled(f)

    token = sapo(logs, f.advantages[:, None], temperature_positive=1.0, temperature_negative=1.05)

    assert_golden(token.losses * f.mask, vector["loss_tok"])
    assert_golden((token.losses * f.mask).sum() / f.mask.sum(), vector["token_mean"])


@both_dtypes
def test_cross_entropy_on_expert_labels(dtype: torch.dtype) -> None:
    vector = VECTORS["DAGGER"]["loss"]
    token = cross_entropy(tensor([vector["p_expert_action"]], dtype).log())
    assert_golden(token.losses.mean(), vector["ce"])


@both_dtypes
def test_dppo_is_the_weighted_policy_gradient_on_what_the_trust_mask_kept(
    dtype: torch.dtype,
) -> None:
    f, vector = FixtureF(dtype), VECTORS["F.dppo_tv_.2_theta_vs_mu"]
    target, _ = filled(f)
    weight = to_ratio(log_ratio(f.target, f.behaviour, f.mask)) * tensor(vector["keep"], dtype)

    losses = reinforce(target, f.advantages[:, None]).losses * weight
    (gradient,) = torch.autograd.grad(losses.sum(), target)

    assert_golden(losses.detach(), vector["loss_tok"])
    assert_golden(gradient, vector["dloss_dlogp"])


@both_dtypes
def test_prime_rl_default_with_its_pull_to_mu_on_rejected_tokens_too(dtype: torch.dtype) -> None:
    f = FixtureF(dtype)
    target, _ = filled(f)
    keep = tensor(VECTORS["F.dppo_tv_.2_theta_vs_mu"]["keep"], dtype)
    logs = log_ratio(target, f.behaviour, f.mask)
    never = ppo_clip(logs, f.advantages[:, None], clip_low=1.0, clip_high=float("inf"))

    pull = 1e-3 * log_ratio_square(target, f.behaviour, f.mask)
    rows = (never.losses * keep + pull).sum(dim=1)
    (gradient,) = torch.autograd.grad(rows.sum(), target)

    assert not (never.clipped_low | never.clipped_high).any()
    assert_golden(rows, PRIME_RL_ROWS)
    assert_golden(gradient, PRIME_RL_GRADIENT)


def centred(vector: dict[str, Any], logits: Tensor, weight: CenteredWeight) -> ScoreCentered:
    """Score centring of one token from the probabilities of a vector."""
    logprobs = logits.log_softmax(dim=-1)
    behaviour = tensor(vector["q"], logits.dtype).log()
    head, chosen = vector["H"], vector["y"]
    return score_centered(
        logprobs[chosen].view(1, 1),
        behaviour[chosen].view(1, 1),
        logprobs[head].view(1, 1, -1),
        behaviour[head].view(1, 1, -1),
        tensor([[vector["A"]]], logits.dtype),
        torch.ones(1, 1, dtype=torch.bool),
        weight=weight,
        low=0.0,
        high=2.0,
    )


@both_dtypes
@pytest.mark.parametrize(
    ("name", "weight"),
    [("sc_only", CenteredWeight.NONE), ("tis_sc_C2", CenteredWeight.TRUNCATE)],
)
def test_score_centering(dtype: torch.dtype, name: str, weight: CenteredWeight) -> None:
    vector = VECTORS["SC"][name]
    logits = tensor(vector["p"], dtype).log().requires_grad_()

    result = centred(vector, logits, weight)
    (gradient,) = torch.autograd.grad(result.token.losses.sum(), logits)

    assert_golden(result.token.losses[0, 0], vector["loss"])
    assert_golden(gradient, vector["grad_logits"])
    assert_golden(result.head.tail_ratio[0, 0], vector["rho"])
    assert_golden(result.head.coefficient_l1[0, 0], sum(map(abs, vector["coef"])))
    assert_golden(result.head.behaviour_mass[0, 0], sum(vector["q"][v] for v in vector["H"]))
    assert_golden(result.head.target_mass[0, 0], sum(vector["p"][v] for v in vector["H"]))


@both_dtypes
def test_reco_from_its_secondary_source(dtype: torch.dtype) -> None:
    vector = VECTORS["RECO_secondary"]
    target = tensor([[vector["p"]]], dtype).log().requires_grad_()
    anchor = tensor([[vector["p_old"]]], dtype).log()

    one = torch.ones(1, 1, dtype=dtype)
    token = reco_clip(target, anchor, one, clip_low=0.9, clip_high=0.2)
    (gradient,) = torch.autograd.grad(token.losses.sum(), target)

    assert_golden(-token.losses[0, 0], vector["r_var"])
    assert_golden(-gradient[0, 0], vector["r_var"])


@both_dtypes
def test_reco_weights_of_a_group(dtype: torch.dtype) -> None:
    vector = VECTORS["RECO_secondary"]
    logprobs = tensor(vector["pi_bar"], dtype).log()[:, None].expand(4, 3)
    mask = torch.tensor([[True, True, True], [True, False, True], [True] * 3, [False, True, False]])
    group = torch.full((4,), 7)

    weights = reco_weights(logprobs, mask, group, max_weight=5.0)

    assert_golden(weights, vector["w_clip5_meannorm"])
    unbounded = reco_weights(logprobs, mask, group, max_weight=1e9)
    assert_golden(unbounded * tensor(vector["w"]).mean().to(dtype), vector["w"])
