"""REINFORCE++ and its baseline form beside verl: returns that skip tool text, and whitening."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from correction.advantages import dr_grpo_advantages
from correction.token_advantages import (
    WhitenUnit,
    discounted_returns,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
)
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.comparison import compared
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_source import needs

pytestmark = needs["verl"]
GAMMA = 0.97


def stream(count: int) -> Iterator[PeerBatch]:
    """Batches of more than one action token: verl refuses to whiten one."""
    return (batch for batch in batches(count) if int(batch.mask.sum()) > 1)


def verls(
    batch: PeerBatch, rewards: Tensor | None = None, gamma: float = GAMMA
) -> tuple[Tensor, Tensor]:
    """verl's advantages and returns [B, T]; the batch's own token rewards unless given."""
    rewards = batch.token_rewards if rewards is None else rewards
    advantages, returns = verl.core().compute_reinforce_plus_plus_outcome_advantage(
        rewards, batch.float_mask, SimpleNamespace(gamma=gamma)
    )
    return advantages, returns


def test_returns_that_skip_tool_text_are_verls() -> None:
    with compared("discounted_returns, tool gaps", "verl reinforce++") as seen:
        for batch in stream(2000):
            seen.batch(batch.seed)
            ours = discounted_returns(batch.token_rewards, batch.mask, gamma=GAMMA)
            seen.same(ours, verls(batch)[1])


def test_reinforce_pp_departs_by_epsilons() -> None:
    with compared("reinforce_pp, std_ddof 1", "verl reinforce++", "means over n + 1e-8") as seen:
        for batch in stream(1000):
            seen.batch(batch.seed)
            returns = discounted_returns(batch.token_rewards, batch.mask, gamma=GAMMA)[batch.mask]
            ours = reinforce_pp_advantages(batch.token_rewards, batch.mask, gamma=GAMMA, std_ddof=1)
            theirs = verls(batch)[0][batch.mask]
            seen.departs_as(ours[batch.mask], theirs, verl.whitening(returns))


def test_reinforce_pp_departs_where_all_returns_are_equal() -> None:
    """The mean is off by 1e-8 and the deviation is the root of verl's epsilon, 1e-4."""
    why = "mean over n + 1e-8, then / 1e-4; ours is exactly 0"
    with compared("reinforce_pp, all returns 1", "verl reinforce++", why) as seen:
        for batch in stream(500):
            seen.batch(batch.seed)
            solved = replace(batch, rewards=torch.ones_like(batch.rewards)).rewards_at_end
            rewards = solved * batch.mask
            ours = reinforce_pp_advantages(rewards, batch.mask, gamma=1.0, std_ddof=1)
            assert bool((ours == 0).all())
            theirs = verls(batch, rewards, gamma=1.0)[0][batch.mask]
            returns = discounted_returns(rewards, batch.mask, gamma=1.0)[batch.mask]
            seen.departs_as(ours[batch.mask], theirs, verl.whitening(returns))


def test_reinforce_pp_baseline_departs_by_epsilons() -> None:
    why = "means over n + 1e-8"
    with compared("reinforce_pp_baseline, ddof 1", "verl reinforce++ baseline", why) as seen:
        for batch in stream(1000):
            seen.batch(batch.seed)
            ours = reinforce_pp_baseline_advantages(
                batch.rewards,
                batch.group_index,
                batch.mask,
                unit=WhitenUnit.TOKEN,
                recenter=True,
                std_ddof=1,
            )
            at_tokens = torch.nn.functional.pad(
                batch.rewards[:, None], (0, batch.mask.shape[1] - 1)
            )
            theirs, _ = verl.core().compute_reinforce_plus_plus_baseline_outcome_advantage(
                at_tokens, batch.float_mask, batch.group_index.numpy()
            )
            centred = dr_grpo_advantages(batch.rewards, batch.group_index)[:, None]
            explained = verl.whitening(centred.expand(batch.mask.shape)[batch.mask])
            seen.departs_as(ours[batch.mask], theirs[batch.mask], explained)
