"""Whole recipes, through the learner's own call, beside what verl composes of its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from correction.recipes import RECIPES, resolve
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.comparison import same_losses
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_objective import objective_of
from tests.numerics.peers.peer_source import needs

pytestmark = needs["verl"]
CAP = 2.0


def verls_weights(learner: Tensor, batch: PeerBatch, level: str) -> Tensor:
    """verl's weights learner/mu, truncated at CAP."""
    weights, _ = verl.rollout().compute_rollout_correction_weights(
        learner.detach() - batch.behaviour, batch.float_mask, level, CAP
    )
    assert isinstance(weights, Tensor)
    return weights


def test_decoupled_ppo_is_verls_with_rollout_correction() -> None:
    settings = verl.config(clip_ratio_c=3.0)
    recipe = resolve("decoupled_ppo", {"weight.high": CAP}, max_lag_versions=4, group_size=4)

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return objective_of(recipe, batch, target).loss

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return verl.policy_loss(
            "vanilla",
            target,
            batch.proximal,
            batch.token_advantages,
            batch.float_mask,
            settings,
            weights=verls_weights(batch.proximal, batch, "token"),
        )

    same_losses("recipe decoupled_ppo", "verl vanilla + weights", ours, theirs, batches())


def test_ppo_bypass_is_verls_in_bypass_mode() -> None:
    settings = verl.config(clip_ratio_c=3.0)

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return objective_of(RECIPES["ppo_bypass"], batch, target).loss

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        anchor, mask = batch.behaviour, batch.float_mask
        return verl.policy_loss("vanilla", target, anchor, batch.token_advantages, mask, settings)

    same_losses("recipe ppo_bypass", "verl vanilla, old = mu", ours, theirs, batches())


def test_weighted_reinforce_is_verls() -> None:
    overrides = {
        "weight": {"kind": "target_behaviour", "level": "sequence_product", "high": CAP},
        "aggregation": "sequence_mean_token_sum",
    }
    recipe = resolve("none", overrides, max_lag_versions=4, group_size=4)

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return objective_of(recipe, batch, target).loss

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        loss, _ = verl.core().compute_policy_loss_reinforce(
            batch.behaviour,
            target,
            batch.token_advantages,
            batch.float_mask,
            "seq-mean-token-sum",
            verl.config(),
            verls_weights(target, batch, "sequence"),
        )
        assert isinstance(loss, torch.Tensor)
        return loss

    peer = "verl reinforce + weights"
    same_losses("reinforce, sequence product", peer, ours, theirs, batches())
