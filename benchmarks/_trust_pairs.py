"""Weights, trust masks and anchors beside the peers' on the same tensors.

verl's functions make metrics of their own on the way; that is part of their price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

from torch import Tensor

from correction.aggregation import Aggregation, aggregate
from correction.bounds import Bound, bound_weight
from correction.proximal import loglinear_proximal
from correction.ratios import Level, at_level, log_ratio
from correction.surrogates import reinforce
from correction.trust import Reduction, dppo_kl, dppo_tv, k3_limit, opsm, second_moment
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.peer_batches import PeerBatch
from tests.numerics.peers.peer_source import FOLDER, load
from tests.numerics.peers.trl_functions import functions as trl

Call = Callable[[], object]
Pair = tuple[str, str, Call, Call]
LossOf = Callable[[Tensor], Tensor]


def verl_pairs(batch: PeerBatch) -> Iterator[Pair]:
    """Bounded weights and rejection."""
    mask, rollout = batch.float_mask, verl.rollout()

    def weights(level: Level, bound: Bound, low: float, high: float) -> Call:
        def call() -> object:
            logs = log_ratio(batch.proximal, batch.behaviour, batch.mask)
            logs = at_level(logs, batch.mask, level, batch.turns)
            return bound_weight(logs, bound, low=low, high=high)

        return call

    def their_weights(level: str, threshold: float | str) -> Call:
        return lambda: rollout.compute_rollout_correction_weights(
            batch.proximal - batch.behaviour, mask, level, threshold
        )

    truncated = weights(Level.TOKEN, Bound.TRUNCATE, 0.0, 2.0)
    yield "truncate token", "verl rollout weights", truncated, their_weights("token", 2.0)
    band = weights(Level.SEQUENCE_PRODUCT, Bound.BAND, 0.5, 5.0)
    yield "band sequence", "verl rollout weights", band, their_weights("sequence", "0.5_5.0")

    def limit() -> Tensor:
        logs = log_ratio(batch.proximal, batch.behaviour, batch.mask)
        return k3_limit(logs, batch.mask, limit=0.05, reduction=Reduction.MEAN)

    def their_limit() -> object:
        logs = batch.proximal - batch.behaviour
        return rollout.compute_rollout_rejection_mask(logs, mask, "seq_mean_k3", 0.05)

    yield "k3_limit mean", "verl seq_mean_k3", limit, their_limit


def dppo_losses(batch: PeerBatch, name: str) -> tuple[LossOf, LossOf]:
    """Our DPPO loss and verl's; name: dppo_tv or dppo_kl."""
    settings = verl.config(0.15, 0.15, clip_ratio_c=20.0)
    advantages = batch.token_advantages.contiguous()

    def ours(target: Tensor) -> Tensor:
        logprobs = (target.detach(), batch.proximal, advantages, batch.mask)
        if name == "dppo_tv":
            keep = dppo_tv(*logprobs, low=0.15, high=0.15)
        else:
            keep = dppo_kl(*logprobs, limit=0.15)
        logs = log_ratio(target.detach(), batch.proximal, batch.mask)
        weight = bound_weight(logs, Bound.TRUNCATE, low=0.0, high=20.0).weight * keep
        losses = reinforce(target, advantages).losses * weight
        return aggregate(losses, batch.mask, Aggregation.TOKEN_MEAN, batch.denominators)

    def theirs(target: Tensor) -> Tensor:
        mask = batch.float_mask
        return verl.policy_loss(name, target, batch.proximal, advantages, mask, settings)

    return ours, theirs


def trl_pairs(batch: PeerBatch) -> Iterator[Pair]:
    """OPSM and VESPO's weight."""
    mask, column = batch.float_mask, batch.advantages[:, None]

    def drop() -> Tensor:
        logs = log_ratio(batch.target, batch.behaviour, batch.mask)
        return opsm(logs, batch.token_advantages, batch.mask, limit=0.1)

    def their_drop() -> object:
        return trl().get_off_policy_mask(column, batch.target, batch.behaviour, mask, 0.1)

    yield "opsm", "TRL off policy mask", drop, their_drop

    def smooth() -> object:
        logs = log_ratio(batch.target, batch.proximal, batch.mask)
        logs = at_level(logs, batch.mask, Level.SEQUENCE_PRODUCT, batch.turns)
        advantages = batch.token_advantages
        return bound_weight(logs, Bound.VESPO, low=0.0, high=1.0, advantages=advantages)

    def their_smooth() -> object:
        logs = batch.target - batch.proximal
        return trl().get_gamma_weights(column, logs, mask, None)

    yield "vespo", "TRL gamma weights", smooth, their_smooth


def areal_pairs(batch: PeerBatch) -> Iterator[Pair]:
    """M2PO's mask and the log-linear anchor."""
    library = _areal()
    logs = log_ratio(batch.proximal, batch.behaviour, batch.mask)
    yield (
        "second_moment",
        "AReaL m2po",
        lambda: second_moment(logs, batch.mask, limit=0.04),
        lambda: library._apply_m2po_masking(batch.behaviour, batch.proximal, batch.mask, 0.04),
    )
    versions = 20 - batch.lag
    yield (
        "loglinear_proximal",
        "AReaL loglinear",
        lambda: loglinear_proximal(batch.target, batch.behaviour, batch.lag, batch.mask),
        lambda: library.compute_prox_logp_approximations(
            batch.behaviour, batch.target, versions, 20, "loglinear"
        ),
    )


def _areal() -> SimpleNamespace:
    methods = ("LOGLINEAR", "LINEAR", "ROLLOUT")
    given = {f"PROX_APPROX_METHOD_{name}": name.lower() for name in methods}
    names = {"_apply_m2po_masking", "_get_m2po_loss_mask", "compute_prox_logp_approximations"}
    return load(FOLDER / "areal/trainer/ppo/actor.py", names, given)
