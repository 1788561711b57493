"""Our functions and the peers' on the same tensors, in turns, in one process.

Each side gets the layout and the mask that it wants, made beforehand. Losses are timed forward and
backward. The peers' losses compute a few metrics of their own and ours none. So the whole recipe
stands beside verl's loss, weights and metrics as well; ours has more of these, by bucket of lag.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks import _trust_pairs
from correction.advantages import grpo_advantages, rloo_advantages
from correction.aggregation import Aggregation, aggregate
from correction.gae import gae
from correction.penalties import KlEstimator, kl_penalty
from correction.ratios import log_ratio
from correction.recipes import RECIPES
from correction.steps import StepUnit
from correction.surrogates import TokenLosses, cispo, gspo, ppo_clip, sapo
from correction.token_advantages import discounted_returns, reinforce_pp_advantages
from correction.value_loss import value_loss
from correction.vtrace import vtrace
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.peer_batches import SEED, PeerBatch, make_batch
from tests.numerics.peers.peer_objective import objective_of
from tests.numerics.peers.peer_source import FOLDER, load, missing_reason, ray_file
from tests.numerics.peers.trl_functions import grpo_loss

GAMMA, LAMBDA = 0.99, 0.95
MEAN = Aggregation.TOKEN_MEAN
Call = Callable[[], object]
Pair = tuple[str, str, Call, Call]


def batch_of(trajectories: int, tokens: int) -> PeerBatch:
    """Ragged trajectories in groups of eight, spans of some 100 tokens, small log ratios."""
    return make_batch(
        SEED + 1,
        (trajectories // 8, 8, tokens),
        gaps=True,
        padding_rows=False,
        dtype=torch.float32,
        span_tokens=100,
    )


def beside_peers(trajectories: int, tokens: int, rounds: int) -> dict[str, object]:
    """Medians in ms and the peer's time over ours, by pair; and which pairs we lose."""
    batch, left_off = batch_of(trajectories, tokens), {}
    pairs = list(_rllib(batch))
    makers: Mapping[str, tuple[Callable[[PeerBatch], Iterator[Pair]], ...]] = {
        "torchrl": (_torchrl,),
        "verl": (_verl, _trust_pairs.verl_pairs, _dppo),
        "trl": (_trl, _trust_pairs.trl_pairs),
        "areal": (_trust_pairs.areal_pairs,),
    }
    for package, of_package in makers.items():
        if reason := missing_reason(package):
            left_off[package] = reason
            continue
        for maker in of_package:
            pairs += maker(batch)
    found = {}
    for function, peer, ours, theirs in pairs:
        row = _in_turns(ours, theirs, rounds)
        found[f"{function} / {peer}"] = row
        print(f"  {function:<24} beside {peer:<28} {row}", flush=True)
    slower = [name for name, row in found.items() if row["theirs_over_ours"] < 1.0]
    return {"beside_peers": found, "slower_than_the_peer": slower, "left_off": left_off}


def _in_turns(ours: Call, theirs: Call, rounds: int) -> dict[str, float]:
    """Medians over rounds that alternate, after one uncounted; the ratio is the median of pairs."""
    times: dict[Call, list[float]] = {ours: [], theirs: []}
    for number in range(rounds + 1):
        for call in (ours, theirs) if number % 2 else (theirs, ours):
            began = time.thread_time()
            call()
            if number:
                times[call].append(time.thread_time() - began)
    ratios = [other / mine for mine, other in zip(times[ours], times[theirs], strict=True)]
    return {
        "ours_ms": round(statistics.median(times[ours]) * 1e3, 3),
        "theirs_ms": round(statistics.median(times[theirs]) * 1e3, 3),
        "theirs_over_ours": round(statistics.median(ratios), 2),
    }


def _full(batch: PeerBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log ratios, rewards, values, bootstrap values of rows without a gap: [B, T] and [B]."""
    return batch.target - batch.behaviour, batch.token_rewards, batch.values, batch.advantages


def _our_vtrace(batch: PeerBatch) -> Call:
    every, turns = torch.ones_like(batch.mask), torch.zeros_like(batch.turns)
    return lambda: vtrace(*_full(batch), every, turns, gamma=GAMMA, unit=StepUnit.TOKEN)


def _rllib(batch: PeerBatch) -> Iterator[Pair]:
    file = ray_file("rllib/algorithms/impala/torch/vtrace_torch_v2.py")
    function = load(file, {"vtrace_torch"}).vtrace_torch
    target, behaviour, rewards, values = (
        tensor.t().contiguous()
        for tensor in (batch.target, batch.behaviour, batch.token_rewards, batch.values)
    )
    theirs = {
        "target_action_log_probs": target,
        "behaviour_action_log_probs": behaviour,
        "discounts": torch.full_like(rewards, GAMMA),
        "rewards": rewards,
        "values": values,
        "bootstrap_values": batch.advantages,
    }
    yield "vtrace", "Ray RLlib", _our_vtrace(batch), lambda: function(**theirs)


def _torchrl(batch: PeerBatch) -> Iterator[Pair]:
    names = {"vtrace_advantage_estimate", "generalized_advantage_estimate", "SHAPE_ERR"}
    library = load(FOLDER / "torchrl/objectives/value/functional.py", names)
    _, rewards, values, bootstrap = _full(batch)
    after = torch.cat([values[:, 1:], bootstrap[:, None]], dim=1)
    done = torch.zeros_like(batch.mask)
    done[:, -1] = True
    columns = tuple(t[..., None] for t in (values, after, rewards, done))
    logs = (batch.target[..., None], batch.behaviour[..., None])
    cut = torch.zeros_like(columns[3])
    traced: Call = lambda: library.vtrace_advantage_estimate(GAMMA, *logs, *columns, cut)  # noqa: E731
    yield "vtrace", "torchrl", _our_vtrace(batch), traced
    estimated: Call = lambda: library.generalized_advantage_estimate(GAMMA, LAMBDA, *columns, cut)  # noqa: E731
    ours = _our_gae(batch, torch.ones_like(batch.mask), bootstrap)
    yield "gae", "torchrl", ours, estimated
    vectorised = _torchrl_vectorised()
    yield "gae", "torchrl vectorised", ours, lambda: vectorised(GAMMA, LAMBDA, *columns, cut)


def _torchrl_vectorised() -> Callable[..., object]:
    """torchrl's GAE as a convolution, which drops what is discounted below 1e-7."""
    names = {"_custom_conv1d", "_get_num_per_traj", "_split_and_pad_sequence", "_flatten_batch"}
    of_tensordict = {"TensorDictBase": SimpleNamespace, "expand_right": _expand_right}
    helpers = load(FOLDER / "torchrl/objectives/value/utils.py", names, of_tensordict)
    names = {"vec_generalized_advantage_estimate", "_fast_vec_gae", "_geom_series_like"}
    given: dict[str, object] = {**vars(helpers), "is_dynamo_compiling": bool}  # False
    library = load(FOLDER / "torchrl/objectives/value/functional.py", names, given)
    function: Callable[..., object] = library.vec_generalized_advantage_estimate
    return function


def _expand_right(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """tensordict's function of that name: expand to `shape`, new dimensions at the right."""
    return values[(..., *(None,) * (len(shape) - values.dim()))].expand(shape)


def _our_gae(batch: PeerBatch, mask: Tensor, bootstrap: Tensor) -> Call:
    rewards = batch.token_rewards * mask
    return lambda: gae(
        rewards,
        batch.values,
        bootstrap,
        mask,
        batch.turns,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        unit=StepUnit.TOKEN,
    )


def _verl(batch: PeerBatch) -> Iterator[Pair]:
    yield from _verl_advantages(batch)
    yield from _verl_losses(batch)
    core, mask = verl.core(), batch.float_mask

    def penalty(target: Tensor) -> Tensor:
        return kl_penalty(target, batch.reference, batch.mask, KlEstimator.K3).sum()

    def their_penalty(target: Tensor) -> Tensor:
        total = (core.kl_penalty(target, batch.reference, "k3") * mask).sum()
        assert isinstance(total, Tensor)
        return total

    yield "kl_penalty k3", "verl k3", _step(batch, penalty), _step(batch, their_penalty)

    def critic(values: Tensor) -> Tensor:
        found = value_loss(
            values, batch.token_rewards, batch.mask, old_values=batch.values, clip=0.2
        )
        return aggregate(found.losses, batch.mask, MEAN, batch.denominators)

    def their_critic(values: Tensor) -> Tensor:
        loss, _ = core.compute_value_loss(values, batch.token_rewards, batch.values, mask, 0.2)
        assert isinstance(loss, Tensor)
        return loss

    yield "value_loss, clip", "verl value loss", _step(batch, critic), _step(batch, their_critic)


def _verl_advantages(batch: PeerBatch) -> Iterator[Pair]:
    core, mask, rewards = verl.core(), batch.float_mask, batch.token_rewards
    ended = torch.zeros_like(batch.advantages)
    settings = SimpleNamespace(gamma=GAMMA)
    index, at_end = batch.group_index.numpy(), batch.rewards_at_end
    yield (
        "gae, tool gaps",
        "verl gae",
        _our_gae(batch, batch.mask, ended),
        lambda: core.compute_gae_advantage_return(rewards, batch.values, mask, GAMMA, LAMBDA),
    )
    whitened: Call = lambda: core.compute_reinforce_plus_plus_outcome_advantage(  # noqa: E731
        rewards, mask, settings
    )
    returns: Call = lambda: discounted_returns(rewards, batch.mask, gamma=GAMMA)  # noqa: E731
    yield "discounted_returns", "verl reinforce++, whitened", returns, whitened
    ours: Call = lambda: reinforce_pp_advantages(rewards, batch.mask, gamma=GAMMA, std_ddof=1)  # noqa: E731
    yield "reinforce_pp", "verl reinforce++", ours, whitened
    grpo: Call = lambda: grpo_advantages(batch.rewards, batch.group_index, std_ddof=1)  # noqa: E731
    rloo: Call = lambda: rloo_advantages(batch.rewards, batch.group_index)  # noqa: E731
    for name, ours, peer in (
        ("grpo", grpo, "grpo"),
        ("rloo", rloo, "rloo"),
        ("rloo", rloo, "rloo_vectorized"),
    ):
        function = getattr(core, f"compute_{peer}_outcome_advantage")
        yield name, f"verl {peer}", ours, lambda f=function: f(at_end, mask, index)  # type: ignore[misc]


def _verl_losses(batch: PeerBatch) -> Iterator[Pair]:
    mask, advantages = batch.float_mask, batch.token_advantages.contiguous()
    settings = verl.config(0.2, 0.28, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05)

    def theirs(name: str) -> Call:
        return _step(
            batch,
            lambda target: verl.policy_loss(
                name, target, batch.proximal, advantages, mask, settings
            ),
        )

    names = {"ppo_clip": "vanilla", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
    for ours, name in names.items():
        yield ours, f"verl {name}", _our_loss(batch, ours), theirs(name)

    def with_weights(target: Tensor) -> Tensor:
        weights, _ = verl.rollout().compute_rollout_correction_weights(
            batch.proximal - batch.behaviour, mask, "token", 2.0
        )
        verl.rollout().compute_offpolicy_metrics(batch.proximal, batch.behaviour, mask)
        return verl.policy_loss(
            "vanilla", target, batch.proximal, advantages, mask, settings, weights=weights
        )

    def recipe(target: Tensor) -> Tensor:
        return objective_of(RECIPES["decoupled_ppo"], batch, target).loss

    whole, composed = _step(batch, recipe), _step(batch, with_weights)
    yield "whole decoupled_ppo", "verl weights, loss, metrics", whole, composed


def _dppo(batch: PeerBatch) -> Iterator[Pair]:
    for name in ("dppo_tv", "dppo_kl"):
        ours, theirs = _trust_pairs.dppo_losses(batch, name)
        yield name, f"verl {name}", _step(batch, ours), _step(batch, theirs)


def _trl(batch: PeerBatch) -> Iterator[Pair]:
    for ours, loss_type in {"ppo_clip": "dapo", "cispo": "cispo", "sapo": "sapo"}.items():
        theirs = _step(batch, lambda target, kind=loss_type: grpo_loss(batch, target, kind))  # type: ignore[misc]
        yield ours, f"TRL {loss_type}", _our_loss(batch, ours), theirs


def _our_loss(batch: PeerBatch, name: str) -> Call:
    """A surrogate from logprobs to the aggregated loss, forward and backward."""
    advantages = batch.advantages[:, None]

    def token_losses(target: Tensor, logs: Tensor) -> TokenLosses:
        if name == "ppo_clip":
            return ppo_clip(logs, advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        if name == "gspo":
            return gspo(logs, batch.mask, advantages, clip_low=0.2, clip_high=0.28)
        if name == "cispo":
            return cispo(logs, target, advantages, clip_low=0.2, clip_high=0.28)
        return sapo(logs, advantages)

    def loss(target: Tensor) -> Tensor:
        logs = log_ratio(target, batch.proximal, batch.mask)
        token = token_losses(target, logs)
        return aggregate(token.losses, batch.mask, MEAN, batch.denominators)

    return _step(batch, loss)


def _step(batch: PeerBatch, loss: Callable[[Tensor], Tensor]) -> Call:
    """Forward and backward from fresh target logprobs."""

    def call() -> None:
        loss(batch.target.clone().requires_grad_()).backward()  # type: ignore[no-untyped-call]

    return call
