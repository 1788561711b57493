"""CISPO and SAPO beside verl and TRL: values, and gradients in the target logprobs."""

from __future__ import annotations

import pytest
from torch import Tensor

from correction.aggregation import Aggregation, aggregate
from correction.ratios import log_ratio
from correction.surrogates import cispo, sapo
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.comparison import departing_losses, same_losses
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_source import needs
from tests.numerics.peers.trl_functions import grpo_loss

TAUS = (1.0, 17 / 16)
"""Temperatures that float32 holds exactly: TRL rounds them to float32."""


def our_cispo(batch: PeerBatch, target: Tensor, low: float, high: float) -> Tensor:
    """A mean over tokens."""
    logs = log_ratio(target, batch.proximal, batch.mask)
    token = cispo(logs, target, batch.token_advantages, clip_low=low, clip_high=high)
    return aggregate(token.losses, batch.mask, Aggregation.TOKEN_MEAN, batch.denominators)


def sapo_tokens(batch: PeerBatch, target: Tensor) -> Tensor:
    """SAPO's token losses [B, T]."""
    logs = log_ratio(target, batch.proximal, batch.mask)
    positive, negative = TAUS
    return sapo(
        logs,
        batch.token_advantages,
        temperature_positive=positive,
        temperature_negative=negative,
    ).losses


def our_sapo(batch: PeerBatch, target: Tensor) -> Tensor:
    """A mean over trajectories of their means."""
    mode = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    return aggregate(sapo_tokens(batch, target), batch.mask, mode, batch.denominators)


@needs["verl"]
@pytest.mark.parametrize(("low", "high"), [(1.0, 0.5), (0.2, 0.28)])
def test_cispo_is_verls(low: float, high: float) -> None:
    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return our_cispo(batch, target, low, high)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        settings, mask = verl.config(low, high), batch.float_mask
        advantages = batch.token_advantages
        return verl.policy_loss("cispo", target, batch.proximal, advantages, mask, settings)

    same_losses(f"cispo {low:g}/{high:g}", "verl cispo", ours, theirs, batches())


@needs["trl"]
def test_cispo_is_trls_whose_cap_is_absolute() -> None:
    """TRL's epsilon_high = 5 caps the ratio at 5: our clip_high is 4."""

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return our_cispo(batch, target, 1.0, 4.0)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return grpo_loss(batch, target, "cispo", epsilons=(0.2, 5.0))

    stream = batches(padding_rows=False)
    same_losses("cispo, cap 5", "TRL cispo, epsilon_high 5", ours, theirs, stream)


@needs["trl"]
def test_cispos_cap_is_not_trls_number() -> None:
    """The same number in both configs is another cap."""

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return our_cispo(batch, target, 1.0, 2.0)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return grpo_loss(batch, target, "cispo", epsilons=(0.2, 2.0))

    def one_less(batch: PeerBatch, target: Tensor) -> Tensor:
        return our_cispo(batch, target, 1.0, 1.0)

    why = "the cap is absolute, ours is 1 + clip_high as in the paper"
    stream = batches(500, padding_rows=False)
    peer = "TRL cispo, epsilon_high 2"
    departing_losses("cispo, clip_high 2", peer, why, ours, theirs, one_less, stream)


@needs["trl"]
def test_sapo_is_trls() -> None:
    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return grpo_loss(batch, target, "sapo", sapo_temperature_neg=TAUS[1])

    same_losses("sapo", "TRL sapo", our_sapo, theirs, batches(padding_rows=False))


@needs["verl"]
def test_sapo_departs_from_verl_by_an_epsilon() -> None:
    settings = verl.config(tau_pos=TAUS[0], tau_neg=TAUS[1])

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        mask = batch.float_mask
        advantages = batch.token_advantages
        return verl.policy_loss("sapo", target, batch.proximal, advantages, mask, settings)

    def explained(batch: PeerBatch, target: Tensor) -> Tensor:
        count = batch.float_mask.sum(dim=1, keepdim=True)
        losses = sapo_tokens(batch, target) * count / (count + 1e-8)
        mode = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
        return aggregate(losses, batch.mask, mode, batch.denominators)

    why = "divides by n + 1e-8"
    departing_losses("sapo", "verl sapo", why, our_sapo, theirs, explained, batches())
