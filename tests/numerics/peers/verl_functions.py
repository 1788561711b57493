"""verl's functions, loaded once: losses, advantages, weights and rejection.

verl's masks are numbers and its losses take a config object; both are made here.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.numerics.peers.peer_source import FOLDER, load

MODES = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
    "sequence_mean_token_mean": "seq-mean-token-mean",
}
"""verl's name of each of our aggregations."""


class ActorConfig(SimpleNamespace):
    """What verl's losses read of their config."""

    def get(self, name: str, default: object = None) -> object:
        """As a mapping's."""
        return getattr(self, name, default)


class AlgoConfig(SimpleNamespace):
    """Only asked for by type."""


def config(low: float = 0.2, high: float = 0.2, **others: object) -> ActorConfig:
    """A config with clip bounds."""
    return ActorConfig(
        clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, global_batch_info={}, **others
    )


@cache
def helpers() -> SimpleNamespace:
    """Masked reductions."""
    names = {"masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"}
    return load(FOLDER / "verl/utils/torch_functional.py", names)


@cache
def core() -> SimpleNamespace:
    """verl/trainer/ppo/core_algos.py."""
    losses = {
        f"compute_policy_loss_{name}"
        for name in (
            "vanilla",
            "gspo",
            "sapo",
            "cispo",
            "dppo_tv",
            "dppo_kl",
            "geo_mean",
            "dro",
            "reinforce",
        )
    }
    advantages = {
        f"compute_{name}_outcome_advantage"
        for name in (
            "grpo",
            "rloo",
            "rloo_vectorized",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
        )
    }
    others = {
        "agg_loss",
        "compute_gae_advantage_return",
        "compute_value_loss",
        "compute_rewards",
        "kl_penalty",
        "kl_penalty_forward",
        "AdaptiveKLController",
    }
    given = {"verl_F": helpers(), "ActorConfig": ActorConfig, "AlgoConfig": AlgoConfig}
    return load(FOLDER / "verl/trainer/ppo/core_algos.py", losses | advantages | others, given)


@cache
def rollout() -> SimpleNamespace:
    """verl/trainer/ppo/rollout_corr_helper.py."""
    names = {
        "SAFETY_BOUND",
        "SUPPORTED_ROLLOUT_RS_OPTIONS",
        "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS",
        "_parse_rollout_is_threshold",
        "_parse_rollout_rs_thresholds",
        "compute_rollout_rejection_mask",
        "compute_rs_metrics",
        "compute_rollout_correction_weights",
        "compute_is_metrics",
        "compute_offpolicy_metrics",
    }
    given = {"verl_F": helpers()}
    return load(FOLDER / "verl/trainer/ppo/rollout_corr_helper.py", names, given)


def policy_loss(
    name: str,
    target: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: ActorConfig,
    *,
    mode: str = "token_mean",
    weights: Tensor | None = None,
) -> Tensor:
    """One of verl's policy losses. target, proximal, advantages, mask (numbers): [B, T]."""
    function = getattr(core(), f"compute_policy_loss_{name}")
    loss, _ = function(
        proximal, target, advantages, mask, MODES[mode], settings, rollout_is_weights=weights
    )
    assert isinstance(loss, torch.Tensor)
    return loss


def whitening(values: Tensor) -> Tensor:
    """verl's masked_whiten of what is not masked, [n]: how its epsilons move ours.

    (x - mean) / sqrt(unbiased variance + 1e-8), with n + 1e-8 in both means.
    """
    count = values.numel()
    mean = values.sum() / (count + 1e-8)
    variance = (values - mean).square().sum() / (count + 1e-8) * count / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)
