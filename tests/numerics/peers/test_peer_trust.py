"""Trust masks, the smooth bound and the log-linear anchor beside verl, TRL and AReaL."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from correction.aggregation import Aggregation, aggregate
from correction.bounds import Bound, bound_weight
from correction.proximal import loglinear_proximal
from correction.ratios import Level, at_level, log_ratio
from correction.surrogates import reinforce
from correction.trust import (
    Reduction,
    dppo_kl,
    dppo_tv,
    geometric_band,
    k3_limit,
    opsm,
    second_moment,
)
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.comparison import compared, same_losses
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_source import FOLDER, load, needs
from tests.numerics.peers.trl_functions import functions as trl
from tests.numerics.peers.trl_functions import grpo_loss

LIMITS = {Reduction.MEAN: 0.05, Reduction.SUM: 0.3, Reduction.MAX: 0.1}


@cache
def areal() -> SimpleNamespace:
    """areal/trainer/ppo/actor.py; its constants are the names of methods."""
    methods = ("LOGLINEAR", "LINEAR", "ROLLOUT")
    given = {f"PROX_APPROX_METHOD_{name}": name.lower() for name in methods}
    functions = {"_apply_m2po_masking", "_get_m2po_loss_mask", "compute_prox_logp_approximations"}
    return load(FOLDER / "areal/trainer/ppo/actor.py", functions, given)


def logs_of(batch: PeerBatch) -> Tensor:
    """Token log prox/mu: [B, T]."""
    return log_ratio(batch.proximal, batch.behaviour, batch.mask)


def as_numbers(keep: Tensor, batch: PeerBatch) -> Tensor:
    """A keep-mask as the peers have it: 0 where masked too."""
    return (keep & batch.mask).double()


def verls_mask(batch: PeerBatch, rule: str, threshold: float) -> Tensor:
    """verl's mask after rejection [B, T]."""
    mask, _ = verl.rollout().compute_rollout_rejection_mask(
        batch.proximal - batch.behaviour, batch.float_mask, rule, threshold
    )
    assert isinstance(mask, Tensor)
    return mask


@needs["verl"]
@pytest.mark.parametrize("reduction", Reduction)
def test_k3_limits_are_verls(reduction: Reduction) -> None:
    with compared(f"k3_limit {reduction}", f"verl seq_{reduction}_k3") as seen:
        for batch in batches():
            keep = k3_limit(
                logs_of(batch), batch.mask, limit=LIMITS[reduction], reduction=reduction
            )
            theirs = verls_mask(batch, f"seq_{reduction}_k3", LIMITS[reduction])
            seen.batch(batch.seed)
            seen.same(as_numbers(keep, batch), theirs)


@needs["verl"]
def test_a_symmetric_geometric_band_is_verls() -> None:
    with compared("geometric_band, 1/1.1 to 1.1", "verl seq_mean_k1") as seen:
        for batch in batches():
            keep = geometric_band(logs_of(batch), batch.mask, low=1 / 1.1, high=1.1)
            seen.batch(batch.seed)
            seen.same(as_numbers(keep, batch), verls_mask(batch, "seq_mean_k1", 1.1))


@needs["verl"]
@pytest.mark.parametrize("rule", ["dppo_tv", "dppo_kl"])
def test_dppo_is_verls(rule: str) -> None:
    """The mask, on REINFORCE with theta/mu truncated at 20; mu is the anchor."""
    limit = 0.15 if rule == "dppo_tv" else 0.05
    settings = verl.config(limit, limit, clip_ratio_c=20.0)

    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        logprobs = (target.detach(), batch.proximal, batch.token_advantages, batch.mask)
        if rule == "dppo_tv":
            keep = dppo_tv(*logprobs, low=limit, high=limit)
        else:
            keep = dppo_kl(*logprobs, limit=limit)
        logs = log_ratio(target, batch.proximal, batch.mask)
        weight = bound_weight(logs, Bound.TRUNCATE, low=0.0, high=20.0).weight * keep
        losses = reinforce(target, batch.token_advantages).losses * weight
        return aggregate(losses, batch.mask, Aggregation.TOKEN_MEAN, batch.denominators)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        advantages, mask = batch.token_advantages, batch.float_mask
        return verl.policy_loss(rule, target, batch.proximal, advantages, mask, settings)

    same_losses(f"{rule} {limit:g}", f"verl {rule}", ours, theirs, batches())


@needs["trl"]
def test_opsm_is_trls() -> None:
    with compared("opsm", "TRL get_off_policy_mask") as seen:
        for batch in batches():
            logs = log_ratio(batch.target, batch.behaviour, batch.mask)
            keep = opsm(logs, batch.token_advantages, batch.mask, limit=0.1)
            theirs = trl().get_off_policy_mask(
                batch.advantages[:, None], batch.target, batch.behaviour, batch.float_mask, 0.1
            )
            seen.batch(batch.seed)
            seen.same(as_numbers(keep, batch), theirs * batch.float_mask)


@needs["trl"]
def test_vespo_is_trls() -> None:
    def ours(batch: PeerBatch, target: Tensor) -> Tensor:
        logs = log_ratio(target.detach(), batch.proximal, batch.mask)
        logs = at_level(logs, batch.mask, Level.SEQUENCE_PRODUCT, batch.turns)
        weight = bound_weight(
            logs, Bound.VESPO, low=0.0, high=1.0, advantages=batch.token_advantages
        )
        losses = reinforce(target, batch.token_advantages).losses * weight.weight
        return aggregate(losses, batch.mask, Aggregation.TOKEN_MEAN, batch.denominators)

    def theirs(batch: PeerBatch, target: Tensor) -> Tensor:
        return grpo_loss(batch, target, "vespo")

    stream = batches(padding_rows=False)
    same_losses("vespo, sequence product", "TRL vespo", ours, theirs, stream)


@needs["areal"]
def test_second_moment_is_areals() -> None:
    with compared("second_moment 0.04", "AReaL m2po") as seen:
        for batch in batches():
            keep = second_moment(logs_of(batch), batch.mask, limit=0.04)
            theirs = areal()._apply_m2po_masking(batch.behaviour, batch.proximal, batch.mask, 0.04)
            seen.batch(batch.seed)
            seen.same(as_numbers(keep, batch), theirs.double())


@needs["areal"]
def test_second_moment_departs_where_tokens_are_equally_far() -> None:
    """On log ratios in steps of 1/4: AReaL keeps as many equals as fit, by their order."""
    why = "of equal tokens some are kept, by position; ours share their fate"
    with compared("second_moment, ties", "AReaL m2po", why) as seen:
        for batch in batches(500):
            logs = (logs_of(batch) * 4).round() / 4
            anchor = torch.zeros_like(logs)
            squares = logs[batch.mask].square().sort().values
            count = torch.arange(1, len(squares) + 1)
            fitting = max(1, int((squares.cumsum(0) / count < 0.04).sum()))
            keep = second_moment(logs, batch.mask, limit=0.04)
            theirs = areal()._apply_m2po_masking(anchor, logs, batch.mask, 0.04)
            assert bool((theirs | ~keep | ~batch.mask).all()) or fitting == 1
            kept = torch.tensor(float(as_numbers(keep, batch).sum()))
            seen.batch(batch.seed)
            seen.departs_as(kept, theirs.sum().float(), torch.tensor(float(fitting)))


@needs["areal"]
def test_the_log_linear_anchor_is_areals() -> None:
    """AReaL's share of the way is float32, and so are these batches."""
    with compared("loglinear_proximal", "AReaL loglinear") as seen:
        for batch in batches(dtype=torch.float32):
            ours = loglinear_proximal(batch.target, batch.behaviour, batch.lag, batch.mask)
            theirs = areal().compute_prox_logp_approximations(
                batch.behaviour, batch.target, 20 - batch.lag, 20, "loglinear"
            )["loglinear"]
            seen.batch(batch.seed)
            seen.same(ours[batch.mask], theirs[batch.mask])
