"""KL penalties, the KL reward, the adaptive coefficient and the value loss beside verl and TRL."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from correction.aggregation import Aggregation, aggregate
from correction.masks import fill_masked
from correction.penalties import KlEstimator, adaptive_coefficient, kl_penalty, kl_token_rewards
from correction.ratios import log_ratio
from correction.surrogates import ppo_clip
from correction.value_loss import value_loss
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.comparison import compared, departing_losses, same_losses
from tests.numerics.peers.peer_batches import BATCHES, SEED, PeerBatch, batches
from tests.numerics.peers.peer_source import needs
from tests.numerics.peers.trl_functions import grpo_loss

NAMES = {
    KlEstimator.K1: "k1",
    KlEstimator.K2: "k2",
    KlEstimator.K3: "k3",
    KlEstimator.K3_PLUS: "k3+",
}
MODE = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
BETA = 0.04


def our_penalty(batch: PeerBatch, target: Tensor, estimator: KlEstimator) -> Tensor:
    """Summed over the action tokens."""
    return kl_penalty(target, batch.reference, batch.mask, estimator).sum()


def verls_penalty(batch: PeerBatch, target: Tensor, estimator: KlEstimator) -> Tensor:
    """Summed over the action tokens."""
    penalty = verl.core().kl_penalty(target, batch.reference, NAMES[estimator])
    return fill_masked(penalty, batch.mask).sum()


def is_near(batch: PeerBatch) -> bool:
    """Whether no token's k3 reaches 10, where verl cuts it off."""
    away = (batch.reference - batch.target)[batch.mask]
    return bool((away.expm1() - away < 10).all())


@needs["verl"]
@pytest.mark.parametrize("estimator", KlEstimator)
def test_penalties_are_verls(estimator: KlEstimator) -> None:
    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return our_penalty(batch, target, estimator)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return verls_penalty(batch, target, estimator)

    near = (batch for batch in batches() if is_near(batch))
    same_losses(f"kl_penalty {estimator}", f"verl {NAMES[estimator]}", ours, theirs, near)


@needs["verl"]
def test_k3_departs_above_ten() -> None:
    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return our_penalty(batch, target, KlEstimator.K3)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return verls_penalty(batch, target, KlEstimator.K3)

    def cut(batch: PeerBatch, target: Tensor) -> Tensor:
        penalty = kl_penalty(target, batch.reference, batch.mask, KlEstimator.K3)
        return penalty.clamp(max=10.0).sum()

    why = "k3 of a token is cut off at 10, and has no gradient there"
    departing_losses("kl_penalty k3 above 10", "verl k3", why, ours, theirs, cut, batches())


@needs["trl"]
@pytest.mark.parametrize("reweighted", [False, True])
def test_grpo_with_its_penalty_is_trls(reweighted: bool) -> None:
    """The k3 penalty; reweighted by theta/prox, its gradient included, as TRL's bias correction."""

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        logs = log_ratio(target, batch.proximal, batch.mask)
        token = ppo_clip(logs, batch.token_advantages, clip_low=0.2, clip_high=0.2)
        importance = logs if reweighted else None
        penalty = kl_penalty(
            target, batch.reference, batch.mask, KlEstimator.K3, log_importance=importance
        )
        return aggregate(token.losses + BETA * penalty, batch.mask, MODE, batch.denominators)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return grpo_loss(batch, target, "grpo", beta=BETA, use_bias_correction_kl=reweighted)

    name = "ppo_clip + 0.04 k3" + (", reweighted" if reweighted else "")
    peer = "TRL grpo, beta" + (", bias corrected" if reweighted else "")
    same_losses(name, peer, ours, theirs, batches(padding_rows=False))


@needs["verl"]
def test_rewards_with_a_penalty_are_verls() -> None:
    with compared("kl_token_rewards", "verl compute_rewards") as seen:
        for batch in batches():
            ours = batch.token_rewards + kl_token_rewards(
                batch.proximal, batch.reference, batch.mask, coefficient=0.05
            )
            theirs = verl.core().compute_rewards(
                batch.token_rewards, batch.proximal, batch.reference, 0.05
            )
            seen.batch(batch.seed)
            seen.same(ours[batch.mask], theirs[batch.mask])


@needs["verl"]
def test_the_adaptive_coefficient_is_verls() -> None:
    random = torch.Generator().manual_seed(SEED)
    with compared("adaptive_coefficient", "verl AdaptiveKLController") as seen:
        for number in range(BATCHES):
            measured, target = (torch.rand(2, generator=random) * 10).tolist()
            controller = verl.core().AdaptiveKLController(0.2, target + 0.1, 10_000)
            ours = 0.2
            for _ in range(3):
                controller.update(measured, 256)
                ours = adaptive_coefficient(
                    ours, measured, target=target + 0.1, horizon=10_000, n=256
                )
            seen.batch(SEED + number)
            seen.same(torch.tensor(ours).double(), torch.tensor(float(controller.value)).double())


@needs["verl"]
@pytest.mark.parametrize("clip", [0.2, 1e9])
def test_value_loss_is_verls(clip: float) -> None:
    """With the value clip, and without (verl has no off: a clip that never bites)."""

    def ours(batch: PeerBatch, values: Tensor) -> Tensor:
        plain = clip > 1
        losses = value_loss(
            values,
            batch.token_rewards,
            batch.mask,
            old_values=None if plain else batch.target,
            clip=None if plain else clip,
        )
        mode = Aggregation.TOKEN_MEAN
        return aggregate(losses.losses, batch.mask, mode, batch.denominators)

    def theirs(batch: PeerBatch, values: Tensor) -> Tensor:
        loss, _ = verl.core().compute_value_loss(
            values, batch.token_rewards, batch.target, batch.float_mask, clip
        )
        assert isinstance(loss, Tensor)
        return loss

    name = "value_loss" if clip > 1 else f"value_loss, clip {clip:g}"
    same_losses(name, "verl value loss", ours, theirs, batches())
