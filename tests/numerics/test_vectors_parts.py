"""Golden vectors of single parts: ratios, bounds, surrogates, aggregation."""

from __future__ import annotations

import pytest
import torch

from correction.aggregation import Aggregation, aggregate, count_denominators
from correction.bounds import Bound, bound_weight
from correction.ratios import Level, at_level, log_ratio, to_ratio
from correction.surrogates import gspo, ppo_clip, reinforce
from tests.numerics.golden_vectors import DTYPES, VECTORS, FixtureF, assert_golden, tensor

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@both_dtypes
def test_token_ratios_of_the_fixture(dtype: torch.dtype) -> None:
    f, vector = FixtureF(dtype), VECTORS["F.fixture"]
    pairs = {
        "ratio_theta_prox": (f.target, f.proximal),
        "ratio_prox_mu": (f.proximal, f.behaviour),
        "ratio_theta_mu": (f.target, f.behaviour),
    }
    for name, (upper, lower) in pairs.items():
        ratios = to_ratio(log_ratio(upper, lower, f.mask)) * f.mask
        assert_golden(ratios, vector[name])


@both_dtypes
def test_sequence_ratios_of_the_fixture(dtype: torch.dtype) -> None:
    f, vector = FixtureF(dtype), VECTORS["F.seq_ratios"]
    logs = log_ratio(f.target, f.proximal, f.mask)

    geometric = to_ratio(at_level(logs, f.mask, Level.GEOMETRIC, f.turns))
    product = to_ratio(at_level(logs, f.mask, Level.SEQUENCE_PRODUCT, f.turns))

    assert_golden(geometric[:, 0], vector["geometric"])
    assert_golden(product[:, 0], vector["product"])


@both_dtypes
def test_turn_ratios(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.turn_ratio"]
    logs, turns = tensor([vector["log_ratio"]], dtype), torch.tensor([vector["turn"]])
    mask = torch.ones_like(turns, dtype=torch.bool)

    def at(level: Level) -> torch.Tensor:
        return to_ratio(at_level(logs, mask, level, turns))[0]

    first_of_turn = torch.tensor([0, 2])
    assert_golden(at(Level.TURN_GEOMETRIC)[first_of_turn], vector["turn_geometric"])
    assert_golden(at(Level.TURN_PRODUCT)[first_of_turn], vector["turn_product"])
    assert_golden(at(Level.SEQUENCE_PRODUCT)[0], vector["sequence_product"])
    assert_golden(at(Level.GEOMETRIC)[0], vector["sequence_geometric"])


@both_dtypes
@pytest.mark.parametrize(
    ("bound", "low", "high", "name"),
    [
        (Bound.TRUNCATE, 0.0, 2.0, "tis_C2"),
        (Bound.CLIP, 0.5, 2.0, "clip_half_2"),
        (Bound.BAND, 0.5, 5.0, "icepop_half_5"),
    ],
)
def test_bounds(dtype: torch.dtype, bound: Bound, low: float, high: float, name: str) -> None:
    vector = VECTORS["IS.bounds"]

    weight = bound_weight(tensor(vector["ratio"], dtype).log(), bound, low=low, high=high)

    assert_golden(weight.raw, vector["ratio"])
    assert_golden(weight.weight, vector[name])


def test_a_band_is_on_pi_over_mu_and_not_on_its_inverse() -> None:
    vector = VECTORS["VERL.k1_inversion"]

    ratios = tensor(vector["ratios_pi_over_mu"]).log()
    weight = bound_weight(ratios, Bound.BAND, low=0.5, high=5.0)

    assert (~weight.rejected).int().tolist() == vector["direct_ratio_keep"]


@both_dtypes
def test_geometric_band_keeps_and_drops_whole_trajectories(dtype: torch.dtype) -> None:
    vector = VECTORS["IS.geo_rs"]
    logs = tensor(vector["log_ratio"], dtype)
    mask = torch.ones_like(logs, dtype=torch.bool)

    level = at_level(logs, mask, Level.GEOMETRIC, torch.zeros(2, 3, dtype=torch.int64))
    weight = bound_weight(level, Bound.BAND, low=0.999, high=1.001)

    assert_golden(weight.raw[:, 0], vector["geo"])
    assert (~weight.rejected).all(dim=1).tolist() == vector["keep_band_0_999_1_001"]


@both_dtypes
def test_seed_clip_table(dtype: torch.dtype) -> None:
    vector = VECTORS["PPO.seed_clip_table"]
    for _, ratio, unclipped, clipped in vector["rows"]:
        a = tensor([vector["A"]], dtype)
        logs = tensor([[ratio]], dtype).log()
        token = ppo_clip(logs, a[:, None], clip_low=0.2, clip_high=0.2)
        assert_golden(-token.losses[0, 0], clipped)
        assert_golden(
            -ppo_clip(logs, a[:, None], clip_low=0.9, clip_high=9.0).losses[0, 0], unclipped
        )
        assert bool(token.clipped_high) == (ratio > 1.2)


@both_dtypes
def test_dual_clip_table(dtype: torch.dtype) -> None:
    for ratio, a, dual, loss, slope in VECTORS["PPO.dual_clip"]["rows"]:
        logs = tensor([[ratio]], dtype).log().requires_grad_()
        token = ppo_clip(logs, tensor([[a]], dtype), clip_low=0.2, clip_high=0.2, dual_clip=dual)
        (gradient,) = torch.autograd.grad(token.losses.sum(), logs)
        assert_golden(token.losses[0, 0], loss)
        assert_golden(gradient[0, 0], slope)


@both_dtypes
def test_surrogates_of_the_fixture(dtype: torch.dtype) -> None:
    f = FixtureF(dtype)
    logs = log_ratio(f.target, f.proximal, f.mask).requires_grad_()

    token = ppo_clip(logs, f.advantages[:, None], clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad((token.losses * f.mask).sum(), logs)

    assert_golden(token.losses * f.mask, VECTORS["F.ppo_clip_0.2"]["loss_tok"])
    assert_golden(gradient, VECTORS["F.ppo_clip_0.2"]["grad_logp"])
    higher = ppo_clip(logs, f.advantages[:, None], clip_low=0.2, clip_high=0.28)
    assert_golden(higher.losses * f.mask, VECTORS["F.dapo_clip_higher_.2_.28"]["loss_tok"])
    plain = reinforce(f.target, f.advantages[:, None])
    assert_golden(plain.losses * f.mask, VECTORS["F.reinforce"]["loss_tok"])
    for name in ("F.gspo_paper", "F.gspo_wide"):
        low, high = VECTORS[name]["eps"]
        whole = gspo(logs, f.mask, f.advantages[:, None], clip_low=low, clip_high=high)
        assert_golden(whole.losses[:, 0], VECTORS[name]["seq_loss"])


@both_dtypes
@pytest.mark.parametrize(
    ("aggregation", "name"),
    [
        (Aggregation.TOKEN_MEAN, "token_mean"),
        (Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, "seq_mean_token_mean"),
        (Aggregation.SEQUENCE_MEAN_TOKEN_SUM, "seq_mean_token_sum"),
        (Aggregation.CONSTANT, "dr_grpo_const_L4"),
        (Aggregation.TOKEN_SUM, "token_sum"),
    ],
)
def test_aggregations(dtype: torch.dtype, aggregation: Aggregation, name: str) -> None:
    vector = VECTORS["AGG"]
    losses, mask = tensor(vector["loss"], dtype), torch.tensor(vector["mask"]).bool()
    whole = count_denominators(mask, max_tokens=4)

    assert_golden(aggregate(losses, mask, aggregation, whole), vector[name])
    parts = [aggregate(losses[i : i + 1], mask[i : i + 1], aggregation, whole) for i in (0, 1)]
    assert_golden(parts[0] + parts[1], vector[name])
    if aggregation is Aggregation.TOKEN_MEAN:
        assert_golden(torch.stack(parts), vector["micro_batches_global_denominator"])
