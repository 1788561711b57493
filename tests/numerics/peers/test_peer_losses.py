"""Policy losses and aggregation beside verl: values, and gradients in the target logprobs."""

from __future__ import annotations

import pytest
from torch import Tensor

from correction.aggregation import Aggregation, aggregate
from correction.masks import masked_mean
from correction.ratios import log_ratio
from correction.surrogates import TokenLosses, gspo, ppo_clip, reinforce
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.comparison import compared, departing_losses, same_losses
from tests.numerics.peers.peer_batches import MAX_TOKENS, PeerBatch, batches
from tests.numerics.peers.peer_source import needs

pytestmark = needs["verl"]
MEANS = [mode for mode in Aggregation if mode is not Aggregation.SEQUENCE_MEAN_TOKEN_MEAN]


def total(token: TokenLosses, batch: PeerBatch, mode: Aggregation) -> Tensor:
    """Aggregated by the batch's own counts."""
    return aggregate(token.losses, batch.mask, mode, batch.denominators)


def verls(batch: PeerBatch, target: Tensor, name: str, settings: verl.ActorConfig) -> Tensor:
    """verl's loss of that name, as a mean over tokens."""
    return verl.policy_loss(
        name, target, batch.proximal, batch.token_advantages, batch.float_mask, settings
    )


@pytest.mark.parametrize("mode", MEANS)
def test_aggregation_is_verls(mode: Aggregation) -> None:
    with compared(f"aggregate {mode}", "verl agg_loss") as seen:
        for batch in batches():
            seen.batch(batch.seed)
            ours = aggregate(batch.values, batch.mask, mode, batch.denominators)
            theirs = verl.core().agg_loss(
                batch.values, batch.float_mask, verl.MODES[mode], loss_scale_factor=MAX_TOKENS
            )
            seen.same(ours, theirs)


def test_mean_of_sequence_means_departs_by_an_epsilon() -> None:
    mode = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    with compared(f"aggregate {mode}", "verl agg_loss", "divides by n + 1e-8") as seen:
        for batch in batches():
            seen.batch(batch.seed)
            ours = aggregate(batch.values, batch.mask, mode, batch.denominators)
            count = batch.float_mask.sum(dim=1, keepdim=True)
            moved = batch.values * count / (count + 1e-8)
            explained = aggregate(moved, batch.mask, mode, batch.denominators)
            theirs = verl.core().agg_loss(batch.values, batch.float_mask, verl.MODES[mode])
            seen.departs_as(ours, theirs, explained)


@pytest.mark.parametrize("dual_clip", [3.0, 1.5])
def test_ppo_clip_is_verls(dual_clip: float) -> None:
    settings = verl.config(0.2, 0.28, clip_ratio_c=dual_clip)

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        logs = log_ratio(target, batch.proximal, batch.mask)
        token = ppo_clip(
            logs, batch.token_advantages, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
        )
        return total(token, batch, Aggregation.TOKEN_MEAN)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return verls(batch, target, "vanilla", settings)

    same_losses(f"ppo_clip, dual clip {dual_clip}", "verl vanilla", ours, theirs, batches())


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (3e-4, 4e-4)])
def test_gspo_is_verls(low: float, high: float) -> None:
    settings = verl.config(low, high)

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        logs = log_ratio(target, batch.proximal, batch.mask)
        token = gspo(logs, batch.mask, batch.token_advantages, clip_low=low, clip_high=high)
        return total(token, batch, Aggregation.TOKEN_MEAN)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return verls(batch, target, "gspo", settings)

    same_losses(f"gspo {low:g}/{high:g}", "verl gspo", ours, theirs, batches())


def test_gspo_departs_where_the_ratio_is_clamped() -> None:
    """A trajectory whose geometric ratio exceeds e**10 and whose clip does not bite (A < 0)."""
    settings = verl.config(0.2, 0.28)
    far = 15.0

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        logs = log_ratio(target + far, batch.proximal, batch.mask)
        token = gspo(logs, batch.mask, batch.token_advantages, clip_low=0.2, clip_high=0.28)
        return total(token, batch, Aggregation.TOKEN_MEAN)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return verls(batch, target + far, "gspo", settings)

    def clamped_at_ten(batch: PeerBatch, target: Tensor) -> Tensor:
        logs = log_ratio(target + far, batch.proximal, batch.mask)
        clamped = masked_mean(logs, batch.mask).clamp(max=10.0)[:, None].expand(logs.shape)
        token = ppo_clip(clamped, batch.token_advantages, clip_low=0.2, clip_high=0.28)
        return total(token, batch, Aggregation.TOKEN_MEAN)

    why = "log ratio clamped at 10, ours at +-20"
    stream = batches(200, offset=50_000)
    departing_losses("gspo beyond e**10", "verl gspo", why, ours, theirs, clamped_at_ten, stream)


def test_reinforce_is_verls() -> None:
    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        token = reinforce(target, batch.token_advantages)
        return total(token, batch, Aggregation.SEQUENCE_MEAN_TOKEN_SUM)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        loss, _ = verl.core().compute_policy_loss_reinforce(
            batch.behaviour,
            target,
            batch.token_advantages,
            batch.float_mask,
            "seq-mean-token-sum",
            verl.config(),
        )
        assert isinstance(loss, Tensor)
        return loss

    same_losses("reinforce", "verl reinforce", ours, theirs, batches())
