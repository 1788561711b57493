"""Bounded importance weights, rejection and their diagnostics beside verl."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from correction.bounds import Bound, bound_weight
from correction.masks import fill_masked
from correction.pooling import summarise
from correction.ratios import Level, at_level, log_ratio
from correction.recipes import RECIPES, resolve
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.comparison import Comparison, compared
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_objective import objective_of
from tests.numerics.peers.peer_source import needs

pytestmark = needs["verl"]
LEVELS = {Level.TOKEN: "token", Level.SEQUENCE_PRODUCT: "sequence"}
REJECTION = {
    Level.TOKEN: "token_k1",
    Level.SEQUENCE_PRODUCT: "seq_sum_k1",
    Level.GEOMETRIC: "seq_mean_k1",
}


def logs_of(batch: PeerBatch) -> Tensor:
    """Token log prox/mu: [B, T]."""
    return log_ratio(batch.proximal, batch.behaviour, batch.mask)


def kept(batch: PeerBatch, level: Level, low: float, high: float) -> Tensor:
    """1 where a band keeps an action token, as numbers [B, T]."""
    logs = at_level(logs_of(batch), batch.mask, level, batch.turns)
    band = bound_weight(logs, Bound.BAND, low=low, high=high)
    return (~band.rejected & batch.mask).to(logs.dtype)


def verls_mask(batch: PeerBatch, rule: str, threshold: str) -> Tensor:
    """verl's mask after rejection [B, T]."""
    logs = batch.proximal - batch.behaviour
    mask, _ = verl.rollout().compute_rollout_rejection_mask(
        logs, batch.float_mask, rollout_rs=rule, rollout_rs_threshold=threshold
    )
    assert isinstance(mask, Tensor)
    return mask


def our_weights(batch: PeerBatch, level: Level, bound: Bound, low: float, high: float) -> Tensor:
    """Bounded weights [B, T], 0 where masked, as verl returns them."""
    logs = at_level(logs_of(batch), batch.mask, level, batch.turns)
    return fill_masked(bound_weight(logs, bound, low=low, high=high).weight, batch.mask)


def verls_weights(batch: PeerBatch, level: Level, threshold: str | float) -> Tensor:
    """verl's bounded weights [B, T]; a threshold "low_high" is a band."""
    weights, _ = verl.rollout().compute_rollout_correction_weights(
        batch.proximal - batch.behaviour, batch.float_mask, LEVELS[level], threshold
    )
    assert isinstance(weights, Tensor)
    return weights


@pytest.mark.parametrize("level", LEVELS)
def test_truncated_weights_are_verls(level: Level) -> None:
    with compared(f"truncate {level}", "verl rollout weights") as seen:
        for batch in batches():
            seen.batch(batch.seed)
            ours = our_weights(batch, level, Bound.TRUNCATE, 0.0, 2.0)
            seen.same(ours, verls_weights(batch, level, 2.0))


@pytest.mark.parametrize("level", LEVELS)
def test_band_weights_are_verls_unless_all_are_rejected(level: Level) -> None:
    """Where the band rejects all, verl's metrics divide by zero and the step fails."""
    failed = 0
    with compared(f"band {level} as weight", "verl rollout weights") as seen:
        for batch in batches():
            seen.batch(batch.seed)
            ours = our_weights(batch, level, Bound.BAND, 0.5, 5.0)
            if bool((ours > 0).any()):
                seen.same(ours, verls_weights(batch, level, "0.5_5.0"))
                continue
            failed += 1
            with pytest.raises(ZeroDivisionError):
                verls_weights(batch, level, "0.5_5.0")
    assert failed > 0


@pytest.mark.parametrize("level", REJECTION)
def test_a_symmetric_band_is_verls(level: Level) -> None:
    with compared(f"band {level}, 1/1.5 to 1.5", f"verl {REJECTION[level]}") as seen:
        for batch in batches():
            seen.batch(batch.seed)
            seen.same(kept(batch, level, 1 / 1.5, 1.5), verls_mask(batch, REJECTION[level], "1.5"))


@pytest.mark.parametrize("level", REJECTION)
def test_an_asymmetric_band_departs_because_verls_is_on_the_inverse(level: Level) -> None:
    why = "its bounds are on mu/pi: 0.5 to 5 drops 4 and keeps 0.25"
    with compared(f"band {level}, 0.5 to 5", f"verl {REJECTION[level]}", why) as seen:
        for batch in batches():
            seen.batch(batch.seed)
            ours, inverse = kept(batch, level, 0.5, 5.0), kept(batch, level, 1 / 5.0, 1 / 0.5)
            seen.departs_as(ours, verls_mask(batch, REJECTION[level], "0.5_5.0"), inverse)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def compare_metrics(seen: Comparison, batch: PeerBatch) -> None:
    """The means over tokens; verl divides by n + 1e-8, which is taken out again."""
    objective = objective_of(RECIPES["decoupled_ppo"], batch, batch.target)
    ours = summarise({key: float(value) for key, value in objective.sums.items()})
    theirs = verl.rollout().compute_offpolicy_metrics(
        batch.proximal, batch.behaviour, batch.float_mask
    )
    count = ours["tokens"]
    exact = (count + 1e-8) / count
    seen.same(number(ours["kl_k1_mu_learner"]), number(theirs["kl"] * exact))
    seen.same(number(ours["kl_k3_mu_learner"]), number(theirs["k3_kl"] * exact))
    seen.same(number(ours["chi2_token"]), number((theirs["chi2_token"] + 1.0) * exact - 1.0))
    rows = batch.mask.any(dim=1)
    share = float(rows.double().mean())
    padded = (ours["chi2_trajectory"] + 1.0) * share + (1.0 - share) - 1.0
    seen.same(number(padded), number(theirs["chi2_seq"]))


def test_distances_of_learner_and_behaviour_are_verls() -> None:
    with compared("kl k1, k3, chi2 token, trajectory", "verl offpolicy metrics") as seen:
        for batch in batches(1000, padding_rows=False):
            seen.batch(batch.seed)
            compare_metrics(seen, batch)


def test_chi2_of_trajectories_departs_by_counting_padding() -> None:
    why = "a padding row counts as a trajectory of ratio 1"
    with compared("chi2 trajectory, padding rows", "verl offpolicy metrics", why) as seen:
        for batch in batches(300):
            seen.batch(batch.seed)
            objective = objective_of(RECIPES["decoupled_ppo"], batch, batch.target)
            sums = {key: float(value) for key, value in objective.sums.items()}
            ours = number(summarise(sums)["chi2_trajectory"])
            share = batch.mask.any(dim=1).double().mean()
            theirs = verl.rollout().compute_offpolicy_metrics(
                batch.proximal, batch.behaviour, batch.float_mask
            )
            seen.departs_as(ours, number(theirs["chi2_seq"]), ours * share)


def test_effective_size_departs_by_epsilons() -> None:
    """verl: 1 / mean((w / (mean w + 1e-8))^2) with n + 1e-8 in the means, of bounded weights."""
    recipe = resolve("decoupled_ppo", {"weight.high": 2.0}, max_lag_versions=4, group_size=4)
    with compared("ess token bounded", "verl is metrics", "three epsilons of 1e-8") as seen:
        for batch in batches(1000):
            seen.batch(batch.seed)
            objective = objective_of(recipe, batch, batch.target)
            ours = summarise({key: float(value) for key, value in objective.sums.items()})
            _, theirs = verl.rollout().compute_rollout_correction_weights(
                batch.proximal - batch.behaviour, batch.float_mask, "token", 2.0
            )
            count, mean = ours["tokens"], ours["weight_mean_bounded"]
            square = mean**2 / ours["ess_ratio_token_bounded"]
            count_up = (count + 1e-8) / count
            explained = (mean / count_up + 1e-8) ** 2 / (square / count_up)
            seen.departs_as(
                number(ours["ess_ratio_token_bounded"]),
                number(theirs["rollout_is_eff_sample_size"]),
                number(explained),
            )
