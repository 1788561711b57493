"""GAE beside verl, whose masks skip tool text as ours do, and torchrl, which knows episodes."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.gae import GaeEstimate, gae
from correction.steps import StepUnit
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.comparison import compared
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_episodes import Episodes, episodes_of
from tests.numerics.peers.peer_source import FOLDER, load, needs

GAMMA, LAMBDA = 31 / 32, 15 / 16
"""Numbers that float32 holds exactly: torchrl rounds its discounts to float32."""


@cache
def torchrl() -> SimpleNamespace:
    names = {"generalized_advantage_estimate", "SHAPE_ERR"}
    return load(FOLDER / "torchrl/objectives/value/functional.py", names)


def ours(batch: PeerBatch, bootstrap: Tensor, **settings: Any) -> GaeEstimate:  # noqa: ANN401
    settings = {"unit": StepUnit.TOKEN, "gamma": GAMMA, "gae_lambda": LAMBDA, **settings}
    rewards, values = batch.token_rewards, batch.values
    return gae(rewards, values, bootstrap, batch.mask, batch.turns, **settings)


def verls(batch: PeerBatch) -> tuple[Tensor, Tensor]:
    """verl's whitened advantages and its returns [B, T]; masked places hold neighbours' values."""
    advantages, returns = verl.core().compute_gae_advantage_return(
        batch.token_rewards, batch.values, batch.float_mask, GAMMA, LAMBDA
    )
    return advantages, returns


def torchrls(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Advantages and value targets [B, S]; what is behind a row's end is another episode."""
    shape = (*episodes.real.shape, 1)
    done = episodes.last | ~episodes.real
    advantages, targets = torchrl().generalized_advantage_estimate(
        GAMMA,
        LAMBDA,
        episodes.values.view(shape),
        episodes.next_values.view(shape),
        episodes.rewards.view(shape),
        done.view(shape),
        (done & ~episodes.cut[:, None]).view(shape),
    )
    return advantages[..., 0], targets[..., 0]


@needs["verl"]
def test_value_targets_of_ended_episodes_are_verls() -> None:
    with compared("gae value targets, ended", "verl gae") as seen:
        for batch in batches():
            if int(batch.mask.sum()) < 2:
                continue  # verl refuses to whiten one token
            found = ours(batch, torch.zeros_like(batch.rewards))
            seen.batch(batch.seed)
            seen.same(found.value_targets[batch.mask], verls(batch)[1][batch.mask])


@needs["verl"]
def test_verl_whitens_the_advantages() -> None:
    with compared("gae advantages, ended", "verl gae", "whitened over the batch") as seen:
        for batch in batches(500):
            if int(batch.mask.sum()) < 2:
                continue
            found = ours(batch, torch.zeros_like(batch.rewards)).advantages[batch.mask]
            seen.batch(batch.seed)
            seen.departs_as(found, verls(batch)[0][batch.mask], verl.whitening(found))


@needs["verl"]
def test_verl_has_no_value_after_a_cut() -> None:
    why = "a cut episode is treated as ended: no bootstrap value"
    with compared("gae value targets, cut", "verl gae", why) as seen:
        for batch in batches(500):
            if int(batch.mask.sum()) < 2:
                continue
            cut = ours(batch, batch.advantages).value_targets
            ended = ours(batch, torch.zeros_like(batch.rewards)).value_targets
            theirs, mask = verls(batch)[1], batch.mask
            seen.batch(batch.seed)
            seen.departs_as(cut[mask], theirs[mask], ended[mask])


@needs["torchrl"]
@pytest.mark.parametrize("unit", StepUnit)
def test_ended_and_cut_episodes_are_torchrls(unit: StepUnit) -> None:
    with compared(f"gae {unit}, ended and cut", "torchrl") as seen:
        for batch in batches():
            episodes = episodes_of(batch, unit)
            found = ours(batch, episodes.bootstrap, unit=unit)
            advantages, targets = torchrls(episodes)
            seen.batch(batch.seed)
            seen.same(episodes.of(found.advantages), advantages[episodes.real])
            seen.same(episodes.of(found.value_targets), targets[episodes.real])
