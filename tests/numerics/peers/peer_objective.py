"""The whole policy objective of a recipe on a PeerBatch: the one call of it among the peers."""

from __future__ import annotations

import torch
from torch import Tensor

from correction.composition import Recipe
from correction.objective import Objective, PolicyInputs, Prepared, policy_objective
from tests.numerics.peers.peer_batches import PeerBatch


def objective_of(recipe: Recipe, batch: PeerBatch, target: Tensor) -> Objective:
    """`policy_objective` with these target logprobs [B, T] and the batch's own counts."""
    inputs = PolicyInputs(
        target_logprobs=target,
        proximal_logprobs=batch.proximal,
        behaviour_logprobs=batch.behaviour,
        lag_versions=batch.lag,
        turn_ids=batch.turns,
    )
    prepared = Prepared(
        action_mask=batch.mask,
        advantages=torch.where(batch.mask, batch.advantages[:, None], 0.0),
        token_rewards=torch.zeros_like(batch.behaviour),
        truncated=torch.zeros(len(batch.mask), dtype=torch.bool),
    )
    return policy_objective(recipe, inputs, prepared, batch.denominators)
