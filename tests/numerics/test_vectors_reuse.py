"""Golden vectors of the recipes that reuse lagged data, from `prepare` to the gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from correction.pooling import summarise
from tests.numerics.golden_runs import on_fixture, one_pass, prepared_from, prepared_with, recipe_of
from tests.numerics.golden_vectors import (
    DTYPES,
    PRIME_RL_GRADIENT,
    PRIME_RL_SUM,
    VECTORS,
    FixtureF,
    assert_golden,
    tensor,
)

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TOKENS, TRAJECTORIES = 5, 2
TO_PROX = {"proximal": "recompute"}
"""The fixture's clips are on theta/prox; these recipes take theta/mu by themselves."""


def log_of(ratios: object, dtype: torch.dtype) -> Tensor:
    return tensor(ratios, dtype).log()


def far_below(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Logprobs of mu from which any ratio of a vector is reached below 0."""
    return torch.full(shape, -3.0, dtype=dtype)


@both_dtypes
def test_dppo(dtype: torch.dtype) -> None:
    f, kept = FixtureF(dtype), VECTORS["F.dppo_tv_.2_theta_vs_mu"]
    objective, gradient = on_fixture("dppo", {}, dtype)

    assert_golden(gradient * TOKENS, PRIME_RL_GRADIENT)
    pull = 1e-3 * (f.target - f.behaviour)[f.mask].square().sum()
    assert_golden(objective.loss * TOKENS, float(tensor(kept["loss_tok"]).sum() + pull))
    without_pull = on_fixture("dppo", {"penalties": []}, dtype)[1]
    assert_golden(without_pull * TOKENS, kept["dloss_dlogp"])


@both_dtypes
def test_dppo_with_the_value_of_prime_rl(dtype: torch.dtype) -> None:
    """There the ratio itself is differentiated: another number, the same gradient."""
    never_clipped = {"kind": "ppo_clip", "clip_low": 0.999, "clip_high": 1e6, "dual_clip": 0.0}
    overrides = {"weight": "none", "surrogate": never_clipped, "aggregation": "token_sum"}
    objective, gradient = on_fixture("dppo", overrides, dtype)

    assert_golden(objective.loss, PRIME_RL_SUM)
    assert_golden(gradient, PRIME_RL_GRADIENT)


@both_dtypes
def test_topr(dtype: torch.dtype) -> None:
    _, gradient = on_fixture("topr", {}, dtype)
    assert_golden(gradient * TRAJECTORIES, VECTORS["F.topr"]["grad_logp"])


@both_dtypes
def test_sequence_tis(dtype: torch.dtype) -> None:
    products = tensor(VECTORS["F.topr"]["seq_product_theta_mu"], dtype)
    _, gradient = on_fixture("sequence_tis", {}, dtype)
    wanted = tensor(VECTORS["F.reinforce_grad_logp"], dtype) * products[:, None]
    assert_golden(gradient * TRAJECTORIES, wanted)


@both_dtypes
def test_aipo(dtype: torch.dtype) -> None:
    _, gradient = on_fixture("aipo", {"weight.high": 1.2}, dtype)
    assert_golden(gradient * TOKENS, VECTORS["F.aipo_rho1.2_grad_logp"])


@both_dtypes
def test_cispo(dtype: torch.dtype) -> None:
    vector = VECTORS["F.cispo_lo1_hi0.5"]
    objective, gradient = on_fixture("cispo", TO_PROX | {"surrogate.clip_high": 0.5}, dtype)
    assert_golden(objective.loss, vector["token_mean"])
    assert_golden(gradient * TOKENS, vector["grad_logp"])


@both_dtypes
def test_sapo(dtype: torch.dtype) -> None:
    vector = VECTORS["F.sapo_tau1_1.05"]
    objective, _ = on_fixture("sapo", TO_PROX | {"aggregation": "token_mean"}, dtype)
    assert_golden(objective.loss, vector["token_mean"])
    objective, _ = on_fixture("sapo", TO_PROX, dtype)
    rows = tensor(vector["loss_tok"]).sum(dim=1) / torch.tensor([3, 2])
    assert_golden(objective.loss, float(rows.mean()))


@both_dtypes
@pytest.mark.parametrize(("name", "row"), [("tis", "tis_C2"), ("icepop", "icepop_half_5")])
def test_bounds_on_prox_over_mu(dtype: torch.dtype, name: str, row: str) -> None:
    vector = VECTORS["IS.bounds"]
    behaviour = far_below((1, 5), dtype)
    proximal = behaviour + log_of([vector["ratio"]], dtype)
    alone = prepared_with(torch.ones(1, dtype=dtype), torch.ones(1, 5, dtype=torch.bool))

    objective, gradient = one_pass(
        recipe_of(name), alone, proximal, behaviour, proximal_logprobs=proximal
    )

    assert_golden(-gradient[0] * TOKENS, vector[row])
    assert_golden(objective.loss, -sum(vector[row]) / TOKENS)


@both_dtypes
def test_geometric_rejection(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.geo_rs"]
    logs = tensor(vector["log_ratio"], dtype)
    behaviour = far_below((2, 3), dtype)
    both = prepared_with(torch.ones(2, dtype=dtype), torch.ones(2, 3, dtype=torch.bool))

    objective, gradient = one_pass(
        recipe_of("geometric_rejection", {"trust.geometric_band": {"low": 0.999, "high": 1.001}}),
        both,
        behaviour + logs,
        behaviour,
        proximal_logprobs=behaviour + logs,
    )

    keep = torch.tensor(vector["keep_band_0_999_1_001"])[:, None]
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(-6 * gradient, logs.exp() * keep, rtol=tolerance, atol=tolerance)
    assert objective.sums["rejected_by_geometric_band@lag=0"].item() == 3


@both_dtypes
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a3po(dtype: torch.dtype, advantage: float) -> None:
    vector = VECTORS["IS.a3po"]
    mu, prox = tensor([vector["logp_mu"]], dtype), tensor([vector["loglinear"]], dtype)
    theta, mask = tensor([vector["logp_theta"]], dtype), torch.tensor([vector["versions"]]) >= 0
    lag = vector["v_theta"] - torch.tensor([vector["versions"]])

    objective, gradient = one_pass(
        recipe_of("a3po"),
        prepared_with(tensor([advantage], dtype), mask),
        theta,
        mu,
        lag_versions=lag,
    )

    # theta/prox is above 1.2 everywhere: the clip holds it where A > 0.
    held = (theta - prox).exp() if advantage < 0 else torch.full_like(theta, 1.2)
    losses = -advantage * (prox - mu).exp() * held
    assert_golden(objective.loss, float(losses[mask].mean()))
    assert_golden(gradient[mask], losses[mask] / 3 if advantage < 0 else [0.0] * 3)


@both_dtypes
def test_gepo(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.gepo"]
    recipe = recipe_of("gepo", {"advantage": "return"})
    behaviour, target = log_of(vector["q"], dtype)[:, None], log_of(vector["p"], dtype)[:, None]
    prepared = prepared_from(recipe, [1.0] * 3, behaviour)

    objective, gradient = one_pass(recipe, prepared, target, behaviour)

    assert_golden(objective.loss, -sum(vector["w"]) / 3)
    assert_golden(-3 * gradient[:, 0], vector["w"])


@both_dtypes
def test_vespo(dtype: torch.dtype) -> None:
    # algorithms.md, section 5.2, row "VESPO": phi at w = 2 and 1/2, for A >= 0 and A < 0
    phi = [0.1991482735, 1.1204222676, 1.0826822659, 0.3397852286]
    recipe = recipe_of("vespo", {"advantage": "return"})
    behaviour = far_below((4, 1), dtype)
    target = behaviour + log_of([2.0, 0.5, 2.0, 0.5], dtype)[:, None]
    prepared = prepared_from(recipe, [1.0, 1.0, -1.0, -1.0], behaviour)

    _, gradient = one_pass(recipe, prepared, target, behaviour)

    assert_golden(gradient[:, 0] * 4, [-phi[0], -phi[1], phi[2], phi[3]])


@both_dtypes
def test_m2po(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.m2po"]
    recipe = recipe_of("m2po", {"advantage": "return"})
    logs, behaviour = tensor([vector["log_ratio"]], dtype), far_below((1, 4), dtype)
    prepared = prepared_from(recipe, [1.0], behaviour, scores=behaviour + logs)

    objective, gradient = one_pass(recipe, prepared, behaviour + logs, behaviour)

    assert_golden(-4 * gradient[0], logs[0].exp() * tensor(vector["keep"], dtype))
    metrics = summarise({key: value.item() for key, value in objective.sums.items()})
    assert metrics["m2"] == pytest.approx(vector["M2"], rel=1e-5)


@both_dtypes
def test_vcpo(dtype: torch.dtype) -> None:
    """Lengths stand for squared gradient norms: 1, 4, 1, 1 sampled tokens."""
    vector = VECTORS["IS.ess_vcpo"]
    lengths = tensor(vector["opob"]["grad_norm"]).square()
    mask = torch.arange(4)[None] < lengths[:, None]
    behaviour = far_below((4, 4), dtype)
    logs = log_of(vector["w"], dtype)[:, None] / lengths[:, None].to(dtype) * mask
    recipe = recipe_of("vcpo")
    rewards = vector["opob"]["R"]
    prepared = prepared_from(recipe, rewards, behaviour, mask=mask, scores=behaviour + logs)

    objective, gradient = one_pass(recipe, prepared, behaviour + logs, behaviour)

    centred = tensor(rewards, dtype) - vector["opob"]["baseline"]
    assert_golden(prepared.advantages[:, 0], centred)
    assert_golden(-4 * gradient[:, 0], centred * tensor(vector["w"], dtype))
    metrics = summarise({key: value.item() for key, value in objective.sums.items()})
    factor = recipe.control.learning_rate_factor(metrics)
    assert factor == pytest.approx(vector["lr_factor_sqrt"], rel=1e-5)


@both_dtypes
def test_deepseek_v32_drops_a_failure_that_theta_has_left_behind(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.opsm"]
    target = tensor([vector["logp_theta"]] * 2, dtype)
    behaviour = tensor([vector["logp_old"]] * 2, dtype)
    failed_and_solved = prepared_with(
        tensor([-1.0, 1.0], dtype),
        torch.ones(2, 2, dtype=torch.bool),
        kl_coefficient=0.04,
        reference_logprobs=target,
    )

    _, gradient = one_pass(recipe_of("deepseek_v32"), failed_and_solved, target, behaviour)

    assert gradient[0].tolist() == [0.0 if not vector["keep_if_A_neg"] else 1.0] * 2
    assert_golden(-4 * gradient[1], (target - behaviour)[1].exp() * vector["keep_if_A_pos"])


@both_dtypes
def test_deepseek_v32_weighs_its_kl(dtype: torch.dtype) -> None:
    vector = VECTORS["KL.unbiased_v32"]
    target = log_of([[0.5]], dtype)
    prepared = prepared_with(
        torch.zeros(1, dtype=dtype),
        torch.ones(1, 1, dtype=torch.bool),
        kl_coefficient=0.04,
        reference_logprobs=log_of([[0.25]], dtype),
    )
    behaviour = target - log_of(vector["ratio_theta_old"], dtype)

    objective, _ = one_pass(recipe_of("deepseek_v32"), prepared, target, behaviour)

    assert_golden(objective.loss, 0.04 * vector["value"])
