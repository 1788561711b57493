"""AReaL's decoupled loss and SAPO beside ours: values, and gradients in the target logprobs.

AReaL takes its weights prox/mu in float32, so those losses are compared on batches of float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.aggregation import Aggregation, aggregate
from correction.composition import Recipe
from correction.ratios import log_ratio
from correction.recipes import resolve
from correction.surrogates import sapo
from tests.numerics.peers.comparison import same_losses
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_objective import objective_of
from tests.numerics.peers.peer_source import FOLDER, load, needs

pytestmark = needs["areal"]


@cache
def areal() -> SimpleNamespace:
    """areal/utils/functional/functional.py."""
    estimators = load(FOLDER / "areal/utils/data.py", {"KLEstimator"})
    names = {
        "ppo_actor_loss_fn",
        "sapo_loss_fn",
        "apply_rejection_sampling",
        "_check_bounds",
        "_compute_sequence_level_ratio_and_advantages",
        "RejectionSamplingResult",
    }
    given = {"dataclass": dataclass, **vars(estimators)}
    return load(FOLDER / "areal/utils/functional/functional.py", names, given)


def areals(batch: PeerBatch, target: Tensor, **rejection: Any) -> Tensor:  # noqa: ANN401
    """The decoupled loss."""
    config = SimpleNamespace(metric="ratio", agg="mean", lower=None, **rejection)
    loss, _ = areal().ppo_actor_loss_fn(
        target,
        batch.proximal,
        batch.behaviour,
        batch.token_advantages,
        0.2,
        batch.mask,
        c_clip=3.0,
        rejection_sampling=config,
    )
    assert isinstance(loss, Tensor)
    return loss


def decoupled(level: str, bound: str, low: float, high: float) -> Recipe:
    """decoupled_ppo with another bound."""
    weight = {"level": level, "bound": bound, "high": high} | (
        {"low": low} if bound == "band" else {}
    )
    return resolve("decoupled_ppo", {"weight": weight}, max_lag_versions=4, group_size=4)


@pytest.mark.parametrize("level", ["token", "geometric"])
@pytest.mark.parametrize("bound", ["truncate", "band"])
def test_decoupled_ppo_is_areals(level: str, bound: str) -> None:
    """A rejected token stays in the denominator, there as here."""
    recipe = decoupled(level, bound, 0.0, 5.0)

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        return objective_of(recipe, batch, target).loss

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        action = "mask" if bound == "band" else "clamp"
        unit = "token" if level == "token" else "sequence"
        return areals(batch, target, level=unit, action=action, upper=5.0)

    name = f"recipe decoupled_ppo, {bound} {level}"
    same_losses(name, "AReaL ppo_actor_loss", ours, theirs, batches(dtype=torch.float32))


def test_sapo_is_areals() -> None:
    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        logs = log_ratio(target, batch.proximal, batch.mask)
        token = sapo(logs, batch.token_advantages)
        return aggregate(token.losses, batch.mask, Aggregation.TOKEN_MEAN, batch.denominators)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        loss, _ = areal().sapo_loss_fn(
            target, batch.proximal, batch.token_advantages, 1.0, 1.05, batch.mask
        )
        assert isinstance(loss, Tensor)
        return loss

    same_losses("sapo, token_mean", "AReaL sapo", ours, theirs, batches())
