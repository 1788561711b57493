"""The whole policy objective of a recipe on a PeerBatch: the one call of it among the peers."""

from __future__ import annotations

from torch import Tensor

from correction.composition import Recipe
from correction.objective import Objective, policy_objective
from tests.numerics.peers.peer_batches import PeerBatch


def objective_of(recipe: Recipe, batch: PeerBatch, target: Tensor) -> Objective:
    """`policy_objective` with these target logprobs [B, T] and the batch's own counts."""
    return policy_objective(
        recipe,
        target_logprobs=target,
        proximal_logprobs=batch.proximal,
        behaviour_logprobs=batch.behaviour,
        advantages=batch.advantages,
        action_mask=batch.mask,
        lag_versions=batch.lag,
        turn_ids=batch.turns,
        denominators=batch.denominators,
    )
