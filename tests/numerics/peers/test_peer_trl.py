"""TRL's GRPO losses beside ours: values, and gradients in the target logprobs.

No padding rows: TRL counts one as a trajectory of loss 0, and its metrics divide by its length.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from correction.aggregation import Aggregation, aggregate
from correction.ratios import log_ratio
from correction.surrogates import gspo, ppo_clip
from tests.numerics.peers.comparison import departing_losses, same_losses
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_source import needs
from tests.numerics.peers.trl_functions import grpo_loss

pytestmark = needs["trl"]
MODES = {
    "grpo": Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    "bnpo": Aggregation.TOKEN_MEAN,
    "dapo": Aggregation.TOKEN_MEAN,
    "dr_grpo": Aggregation.CONSTANT,
}
"""Our aggregation for each of TRL's clipped losses."""


def stream() -> Iterator[PeerBatch]:
    return batches(padding_rows=False)


def our_ppo(
    batch: PeerBatch,
    target: Tensor,
    mode: Aggregation,
    *,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> Tensor:
    """PPO with our clip, aggregated."""
    logs = log_ratio(target, batch.proximal, batch.mask)
    advantages = batch.token_advantages
    token = ppo_clip(logs, advantages, clip_low=0.2, clip_high=clip_high, dual_clip=dual_clip)
    return aggregate(token.losses, batch.mask, mode, batch.denominators)


@pytest.mark.parametrize("loss_type", MODES)
def test_clipped_losses_are_trls(loss_type: str) -> None:
    mode = MODES[loss_type]

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return our_ppo(batch, target, mode, clip_high=0.28)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return grpo_loss(batch, target, loss_type, epsilons=(0.2, 0.28))

    same_losses(f"ppo_clip, {mode}", f"TRL {loss_type}", ours, theirs, stream())


def test_dual_clip_is_trls_delta() -> None:
    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return our_ppo(batch, target, Aggregation.TOKEN_MEAN, dual_clip=3.0)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return grpo_loss(batch, target, "dapo", delta=3.0)

    same_losses("ppo_clip, dual clip 3", "TRL dapo, delta 3", ours, theirs, stream())


def test_gspo_is_trls_sequence_level() -> None:
    mode = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        logs = log_ratio(target, batch.proximal, batch.mask)
        token = gspo(logs, batch.mask, batch.token_advantages, clip_low=3e-4, clip_high=4e-4)
        return aggregate(token.losses, batch.mask, mode, batch.denominators)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return grpo_loss(batch, target, "grpo", level="sequence", epsilons=(3e-4, 4e-4))

    same_losses(f"gspo, {mode}", "TRL grpo, sequence level", ours, theirs, stream())


def test_padding_rows_make_trls_mean_smaller() -> None:
    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return our_ppo(batch, target, Aggregation.SEQUENCE_MEAN_TOKEN_MEAN)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return grpo_loss(batch, target, "grpo")

    def counted(batch: PeerBatch, target: Tensor) -> Tensor:
        return ours(batch, target) * batch.denominators.trajectories / batch.mask.shape[0]

    why = "a padding row counts as a trajectory"
    rows = batches(500)
    departing_losses("ppo_clip, padding rows", "TRL grpo", why, ours, theirs, counted, rows)
