"""Golden vectors of whole recipes on fixture F: loss, gradient and metrics."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from correction.aggregation import Denominators
from correction.objective import Objective, PolicyInputs, policy_objective, summarise
from correction.recipes import resolve
from tests.numerics.golden_runs import on_fixture, prepared_with
from tests.numerics.golden_vectors import DTYPES, VECTORS, assert_golden

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WHOLE = Denominators(action_tokens=5, trajectories=2, max_tokens=4)
UNBOUNDED = {"weight.bound": "none"}
PLAIN = {"weight": "none"}
"""PPO(theta/prox) and nothing else."""


def metrics_of(objective: Objective) -> dict[str, float]:
    return summarise({key: value.item() for key, value in objective.sums.items()})


@both_dtypes
@pytest.mark.parametrize(
    ("aggregation", "name"),
    [
        ("token_mean", "token_mean"),
        ("sequence_mean_token_mean", "seq_mean_token_mean"),
        ("sequence_mean_token_sum", "seq_mean_token_sum"),
        ("constant", "dr_grpo_const"),
        ("token_sum", "token_sum"),
    ],
)
def test_ppo_clip_under_every_aggregation(dtype: torch.dtype, aggregation: str, name: str) -> None:
    vector = VECTORS["F.ppo_clip_0.2"]
    objective, gradient = on_fixture("decoupled_ppo", PLAIN | {"aggregation": aggregation}, dtype)

    assert_golden(objective.loss, vector["agg"][name])
    if aggregation == "token_sum":
        assert_golden(gradient, vector["grad_logp"])


@both_dtypes
def test_clip_fractions_by_side_and_sign(dtype: torch.dtype) -> None:
    vector = VECTORS["F.ppo_clip_0.2"]
    metrics = metrics_of(on_fixture("decoupled_ppo", PLAIN, dtype)[0])

    assert metrics["clip_fraction_high_positive"] == pytest.approx(vector["clipfrac_high_pos"])
    assert metrics["clip_fraction_low_negative"] == pytest.approx(vector["clipfrac_low_neg"])
    others = [
        metrics[f"clip_fraction_{side}"]
        for side in ("low_positive", "high_negative", "dual_positive", "dual_negative")
    ]
    assert others == [0.0] * 4


@both_dtypes
def test_bypass(dtype: torch.dtype) -> None:
    vector = VECTORS["F.ppo_clip_bypass_mu"]
    objective, gradient = on_fixture("ppo_bypass", {}, dtype)

    assert_golden(objective.loss, vector["agg_token_mean"])
    assert_golden(objective.loss * WHOLE.action_tokens, sum(map(sum, vector["loss_tok"])))
    assert_golden(gradient * WHOLE.action_tokens, vector["grad"])


@both_dtypes
@pytest.mark.parametrize(
    ("overrides", "name", "aggregate"),
    [
        ({"weight.bound": "none"}, "no_cap", "token_mean"),
        ({"weight.high": 1.25}, "tis_cap_1_25", "token_mean"),
        (
            {"weight": {"bound": "band", "low": 0.6, "high": 1.25}},
            "mask_band_0_6_1_25",
            "token_mean_original_denominator",
        ),
    ],
)
def test_decoupled_ppo(
    dtype: torch.dtype, overrides: Mapping[str, object], name: str, aggregate: str
) -> None:
    vector = VECTORS["F.decoupled_ppo"][name]
    objective, gradient = on_fixture("decoupled_ppo", overrides, dtype)

    assert_golden(objective.loss, vector[aggregate])
    slopes = torch.tensor(VECTORS["F.ppo_clip_0.2"]["grad_logp"], dtype=dtype)
    weighted = slopes * torch.tensor(vector["w"], dtype=dtype)
    assert_golden(gradient * WHOLE.action_tokens, weighted)


@both_dtypes
@pytest.mark.parametrize("name", ["F.gspo_paper", "F.gspo_wide"])
def test_gspo(dtype: torch.dtype, name: str) -> None:
    vector = VECTORS[name]
    low, high = vector["eps"]
    overrides = {"weight": "none", "surrogate.clip_low": low, "surrogate.clip_high": high}
    objective, gradient = on_fixture("decoupled_gspo", overrides, dtype)

    assert_golden(objective.loss, vector["loss"])
    assert_golden(gradient[:, :2], [[slope, slope] for slope in vector["grad_per_token_logp"]])


@both_dtypes
def test_reinforce(dtype: torch.dtype) -> None:
    objective, gradient = on_fixture("none", {"aggregation": "token_sum"}, dtype)
    assert_golden(gradient, VECTORS["F.reinforce_grad_logp"])
    for aggregation, name in (
        ("token_mean", "token_mean"),
        ("sequence_mean_token_sum", "seq_mean_token_sum"),
    ):
        objective, _ = on_fixture("none", {"aggregation": aggregation}, dtype)
        assert_golden(objective.loss, VECTORS["F.reinforce"][name])


@both_dtypes
def test_metrics_of_the_fixture(dtype: torch.dtype) -> None:
    vector = VECTORS["F.mismatch_prox_mu"]
    metrics = metrics_of(on_fixture("decoupled_ppo", UNBOUNDED, dtype)[0])
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5

    assert vector["M2"] == pytest.approx(2 * vector["k2"])
    assert metrics["tokens"] * vector["ess_token_ratio"] == pytest.approx(vector["ess_token"])
    assert metrics["trajectories"] * vector["ess_seq_ratio"] == pytest.approx(vector["ess_seq"])
    expected = {
        "ess_ratio_token_raw": vector["ess_token_ratio"],
        "ess_ratio_token_bounded": vector["ess_token_ratio"],
        "ess_ratio_trajectory_raw": vector["ess_seq_ratio"],
        "ess_ratio_trajectory_bounded": vector["ess_seq_ratio"],
        "kl_k1_mu_learner": vector["k1_mu_prox"],
        "kl_k3_mu_learner": vector["k3_mu_prox"],
        "m2": 2 * vector["k2"],
        "chi2_token": vector["chi2_token"],
        "chi2_trajectory": vector["chi2_seq"],
        "log_ratio_abs_max": vector["max_abs_log_ratio"],
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("row", VECTORS["KL.estimators"]["rows"])
def test_divergences_of_one_token(row: list[float]) -> None:
    """The table's theta sampled the token (our mu), its reference is our learner."""
    sampled_by, other, _, k1, _, k3, *_ = row
    log = torch.tensor([[other]], dtype=torch.float64).log()
    inputs = PolicyInputs(
        target_logprobs=log,
        proximal_logprobs=log,
        behaviour_logprobs=torch.tensor([[sampled_by]], dtype=torch.float64).log(),
        lag_versions=torch.full((1, 1), 3),
        turn_ids=torch.zeros(1, 1, dtype=torch.int64),
    )
    recipe = resolve("decoupled_ppo", {}, max_lag_versions=4, group_size=2)
    alone = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    objective = policy_objective(recipe, inputs, prepared_with(*alone), Denominators(1, 1, 1))
    metrics = metrics_of(objective)

    assert metrics["kl_k1_mu_learner@lag=3-4"] == pytest.approx(k1, abs=1e-9)
    assert metrics["kl_k3_mu_learner@lag=3-4"] == pytest.approx(k3, abs=1e-9)
    assert metrics["kl_k3_prox_theta"] == 0.0
