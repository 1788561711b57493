"""Golden vectors of the levels, the signed bounds, the trust masks and the proximal policy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from correction.bounds import Bound, bound_weight
from correction.group_ratio import group_log_ratio, log_group_expectation
from correction.masks import fill_masked
from correction.proximal import loglinear_proximal
from correction.ratios import Level, at_level, log_ratio, to_ratio
from correction.reuse import ess_learning_rate_factor
from correction.surrogates import reinforce
from correction.trust import (
    Reduction,
    dppo_tv,
    geometric_band,
    k3_limit,
    opsm,
    second_moment,
)
from tests.numerics.golden_vectors import DTYPES, VECTORS, FixtureF, assert_golden, tensor

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def everywhere(values: Tensor) -> Tensor:
    return torch.ones(values.shape, dtype=torch.bool)


@both_dtypes
def test_ratios_of_the_fixture_to_mu_at_every_level(dtype: torch.dtype) -> None:
    f, vector = FixtureF(dtype), VECTORS["F.mismatch_prox_mu"]
    logs = log_ratio(f.proximal, f.behaviour, f.mask)

    def ratios(level: Level) -> Tensor:
        return to_ratio(at_level(logs, f.mask, level, f.turns))

    assert_golden(fill_masked(ratios(Level.TOKEN), f.mask), vector["token"])
    assert_golden(ratios(Level.GEOMETRIC)[:, 0], vector["geometric"])
    assert_golden(ratios(Level.SEQUENCE_PRODUCT)[:, 0], vector["sequence"])


@both_dtypes
def test_a_product_over_a_long_answer_collapses_and_a_geometric_mean_does_not(
    dtype: torch.dtype,
) -> None:
    logs = torch.full((1, 8000), -0.001, dtype=dtype)
    mask, turns = everywhere(logs), torch.zeros(1, 8000, dtype=torch.int64)

    product = to_ratio(at_level(logs, mask, Level.SEQUENCE_PRODUCT, turns))[0, 0]
    geometric = to_ratio(at_level(logs, mask, Level.GEOMETRIC, turns))[0, 0]

    assert_golden(product, math.exp(-8))
    assert float(product) == pytest.approx(0.000335462628, rel=1e-5)
    assert_golden(geometric, 0.999000499833375)


@both_dtypes
def test_topr(dtype: torch.dtype) -> None:
    f, vector = FixtureF(dtype), VECTORS["F.topr"]
    logs = log_ratio(f.target, f.behaviour, f.mask)
    level = at_level(logs, f.mask, Level.SEQUENCE_PRODUCT, f.turns)
    advantages = f.advantages[:, None].expand(2, 4)

    weight = bound_weight(level, Bound.TOPR, low=9.0, high=0.1, advantages=advantages)
    target = f.target.clone().requires_grad_()
    losses = weight.weight * reinforce(target, advantages).losses
    (gradient,) = torch.autograd.grad(fill_masked(losses, f.mask).sum(), target)

    assert_golden(weight.raw[:, 0], vector["seq_product_theta_mu"])
    assert_golden(weight.weight[:, 0], vector["weights"])
    assert_golden(gradient, vector["grad_logp"])


@both_dtypes
@pytest.mark.parametrize(
    ("advantage", "ratio", "phi"),
    [
        (1.0, 2.0, 0.199148273471456),
        (1.0, 0.5, 1.120422267584516),
        (-1.0, 2.0, 1.082682265892902),
        (-1.0, 0.5, 0.339785228557380),
        (1.0, 1.0, 1.0),
        (-1.0, 1.0, 1.0),
        (0.0, 2.0, 0.199148273471456),
    ],
)
def test_vespo(dtype: torch.dtype, advantage: float, ratio: float, phi: float) -> None:
    logs = tensor([ratio], dtype).log()

    weight = bound_weight(
        logs, Bound.VESPO, low=9.0, high=0.1, advantages=tensor([advantage], dtype)
    )

    assert_golden(weight.weight[0], phi)


@both_dtypes
def test_geometric_rejection_and_the_mean_of_k3(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.geo_rs"]
    logs = tensor(vector["log_ratio"], dtype)
    mask = everywhere(logs)

    keep = geometric_band(logs, mask, low=0.999, high=1.001)
    assert keep.all(dim=1).tolist() == vector["keep_band_0_999_1_001"]
    assert keep.any(dim=1).tolist() == vector["keep_band_0_999_1_001"]

    for row, mean in enumerate(vector["mean_k3"]):
        # k3 is a difference of nearly equal numbers: rounding the logs to fp32 moves it by 1e-7.
        slack = 1e-9 if dtype == torch.float64 else 1e-6
        above = k3_limit(logs, mask, limit=mean * (1 + slack), reduction=Reduction.MEAN)
        below = k3_limit(logs, mask, limit=mean * (1 - slack), reduction=Reduction.MEAN)
        assert bool(above[row].all())
        assert not bool(below[row].any())


def test_a_band_on_the_ratio_keeps_four_and_drops_a_quarter() -> None:
    vector = VECTORS["VERL.k1_inversion"]
    logs = tensor(vector["ratios_pi_over_mu"]).log()[:, None]

    keep = geometric_band(logs, everywhere(logs), low=0.5, high=5.0)

    assert keep[:, 0].int().tolist() == vector["direct_ratio_keep"]


@both_dtypes
def test_dppo_tv(dtype: torch.dtype) -> None:
    f, vector = FixtureF(dtype), VECTORS["F.dppo_tv_.2_theta_vs_mu"]
    advantages = f.advantages[:, None].expand(2, 4)
    keep = dppo_tv(f.target, f.behaviour, advantages, f.mask, low=0.2, high=0.2)
    ratios = bound_weight(
        log_ratio(f.target, f.behaviour, f.mask), Bound.NONE, low=0.0, high=1.0
    ).weight

    target = f.target.clone().requires_grad_()
    losses = fill_masked(reinforce(target, advantages).losses * ratios, keep & f.mask)
    (gradient,) = torch.autograd.grad(losses.sum(), target)

    assert (keep & f.mask).double().tolist() == vector["keep"]
    assert_golden(losses, vector["loss_tok"])
    assert_golden(gradient, vector["dloss_dlogp"])


@both_dtypes
def test_opsm(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.opsm"]
    logs = tensor([vector["logp_theta"]], dtype) - tensor([vector["logp_old"]], dtype)
    mask = everywhere(logs)

    def keeps(advantage: float, limit: float) -> bool:
        advantages = torch.full_like(logs, advantage)
        return bool(opsm(logs, advantages, mask, limit=limit).all())

    assert keeps(-1.0, vector["delta"]) == bool(vector["keep_if_A_neg"])
    assert keeps(1.0, vector["delta"]) == bool(vector["keep_if_A_pos"])
    assert keeps(0.0, vector["delta"])
    distance = vector["mean_old_minus_new"]
    assert keeps(-1.0, distance * (1 + 1e-6))
    assert not keeps(-1.0, distance * (1 - 1e-6))


@both_dtypes
def test_second_moment(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.m2po"]
    logs = tensor([vector["log_ratio"]], dtype)
    mask = everywhere(logs)

    keep = second_moment(logs, mask, limit=vector["tau"])

    assert keep[0].tolist() == vector["keep"]
    assert_golden(logs[keep].square().mean(), vector["M2_after"])
    assert_golden(logs.square().mean(), vector["M2"])
    assert bool(second_moment(logs, mask, limit=vector["M2"] * (1 + 1e-6)).all())
    assert not bool(second_moment(logs, mask, limit=vector["M2"] * (1 - 1e-6)).all())


@both_dtypes
def test_log_linear_proximal_policy(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.a3po"]
    versions = torch.tensor([vector["versions"]])
    mask = versions >= 0
    behaviour, target = tensor([vector["logp_mu"]], dtype), tensor([vector["logp_theta"]], dtype)

    anchor = loglinear_proximal(target, behaviour, vector["v_theta"] - versions, mask)

    assert_golden(anchor[mask], tensor([vector["loglinear"]], dtype)[mask])
    alpha = (anchor - behaviour) / (target - behaviour)
    assert_golden(alpha[mask], tensor([vector["alpha"]], dtype)[mask])
    assert anchor[~mask].tolist() == [0.0]


@both_dtypes
def test_group_ratio(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.gepo"]
    behaviour, target = (tensor(vector[name], dtype).log()[:, None] for name in "qp")
    mask, group = everywhere(behaviour), torch.full((3,), -5)

    expectation = log_group_expectation(behaviour, mask, group)
    ratios = to_ratio(group_log_ratio(target, mask, expectation))

    assert_golden(expectation.exp(), [vector["E_q"]] * 3)
    assert_golden(ratios[:, 0], vector["w"])
    assert_golden(to_ratio(log_ratio(target, behaviour, mask))[:, 0], vector["ordinary"])


def test_learning_rate_factor_by_effective_sample_size() -> None:
    vector = VECTORS["IS.ess_vcpo"]

    def factor(power: float) -> float:
        return ess_learning_rate_factor(vector["ratio"], base_ratio=1.0, power=power)

    assert factor(0.5) == pytest.approx(vector["lr_factor_sqrt"], rel=1e-12)
    assert factor(1.0) == pytest.approx(vector["lr_factor_linear"], rel=1e-12)
    dominated = vector["one_dominates"]
    share = dominated["ess"] / len(dominated["w"])
    assert ess_learning_rate_factor(share, base_ratio=1.0, power=0.5) == pytest.approx(0.5)
