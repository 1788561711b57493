"""Sums of parts become sums of the whole, and those become metrics: pooled, never a mean of means.

add_sums     combines micro-batches or ranks; a learner may all-reduce instead: MAX_PREFIX keys
             by maximum, all others by sum
summarise    divides once, at the end
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import Tensor

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
"""Buckets of policy lag, in versions."""
BUCKET_ENDS_VERSIONS = (0, 1, 2, 4, 8)
"""Largest lag of each bucket but the last."""
MAX_PREFIX = "max_"
"""Sums whose key starts so combine by maximum."""
REJECTED_BY = "rejected_by_"
"""Sums of tokens that a trust mask rejected: key + kind of the mask."""
MEASURE = "measure_"
"""Sums of figures whose mean over tokens is a metric of the rest of the key."""
LOSS = "loss"
"""Sums whose key starts so are shares of the loss, not sorted by lag."""

Number = TypeVar("Number", float, Tensor)
_SIDES, _SIGNS = ("low", "high", "dual"), ("positive", "negative")
_CLIPS = tuple(f"clip_fraction_{side}_{sign}" for side in _SIDES for sign in _SIGNS)
_DIVERGENCES = ("kl_k1_mu_learner", "kl_k3_mu_learner", "kl_k1_prox_theta", "kl_k3_prox_theta")


def at_lag(name: str, bucket: str) -> str:
    """Key of a sum or metric of one bucket of lag."""
    return f"{name}@lag={bucket}"


def add_sums(left: Mapping[str, Number], right: Mapping[str, Number]) -> dict[str, Number]:
    """Sums of two parts as sums of the whole: `max_` keys by maximum, all others added."""
    total = dict(left)
    for key, value in right.items():
        total[key] = _combine(key, total[key], value) if key in total else value
    return total


def _combine(key: str, left: Number, right: Number) -> Number:
    if not key.startswith(MAX_PREFIX):
        return left + right
    return left if bool(left >= right) else right


def summarise(sums: Mapping[str, float]) -> dict[str, float]:
    """Pooled metrics of a whole batch; never NaN. A bucket without tokens gives no metric.

    Overall, and again as `name@lag=BUCKET`:
    tokens, trajectories; policy_lag_mean, policy_lag_max (versions, token-weighted)
    ess_ratio_token_raw, _token_bounded, _trajectory_raw, _trajectory_bounded: (sum w)^2 / (n sum
        w^2) of learner/mu and of the weight that was used; 0 if all was rejected
    weight_mean_raw, weight_mean_bounded; weight_changed_fraction, rejected_fraction (tokens)
    kl_k1_mu_learner, kl_k3_mu_learner, kl_k1_prox_theta, kl_k3_prox_theta (nats a token)
    m2: mean squared log of learner/mu; chi2_token, chi2_trajectory: mean squared ratio - 1
    log_ratio_abs_max (learner/mu), log_ratio_update_abs_max (theta/prox)
    clip_fraction_{low,high,dual}_{positive,negative}: by side and sign of the advantage

    And where the recipe has them:
    rejected_fraction_by_{trust mask}: tokens; several masks may reject the same one
    kl_k1_theta_reference, kl_k3_theta_reference (nats a token, tokens of mu); entropy (nats)
    vtrace_rho: mean ratio under rho_bar; vtrace_advantage: its mean in this pass
    value, value_error_squared: of the critic
    head_mass_behaviour, head_mass_target, head_tail_ratio, centering_l1: of Score Centering

    Overall only:
    mismatch_{tokens,kl_k1,kl_k3,log_ratio_abs_max}: learner/mu on tokens of lag 0, where nothing
        but the engine's arithmetic differs (exact before the first step on the batch)
    lagged_{...}: the same on tokens of lag >= 1.
    loss, and its shares loss_policy, loss_critic, loss_{penalty}
    """
    pooled = {label: _of_buckets(sums, [label]) for label in LAG_BUCKETS}
    metrics = _metrics(_of_buckets(sums, LAG_BUCKETS))
    for label, part in pooled.items():
        metrics |= {at_lag(name, label): value for name, value in _metrics(part).items()}
    metrics |= _engine_mismatch("mismatch", _of_buckets(sums, LAG_BUCKETS[:1]))
    metrics |= _engine_mismatch("lagged", _of_buckets(sums, LAG_BUCKETS[1:]))
    return metrics | {key: float(sums[key]) for key in sums if key.startswith(LOSS)}


def _of_buckets(sums: Mapping[str, float], labels: Iterable[str]) -> dict[str, float]:
    """Sums over some buckets, keyed by the bare names."""
    total: dict[str, float] = {}
    for label in labels:
        end = at_lag("", label)
        part = {key.removesuffix(end): float(sums[key]) for key in sums if key.endswith(end)}
        total = add_sums(total, part)
    return total


def _metrics(part: Mapping[str, float]) -> dict[str, float]:
    tokens = part.get("tokens", 0.0)
    if tokens == 0.0:
        return {}
    metrics = {
        "tokens": tokens,
        "trajectories": part["trajectories"],
        "policy_lag_mean": part["lag_versions"] / tokens,
        "policy_lag_max": part["max_lag_versions"],
        "weight_mean_raw": part["ratio"] / tokens,
        "weight_mean_bounded": part["weight"] / tokens,
        "weight_changed_fraction": part["weight_changed"] / tokens,
        "rejected_fraction": part["weight_rejected"] / tokens,
        "m2": part["log_ratio_squared"] / tokens,
        "chi2_token": part["ratio_squared"] / tokens - 1.0,
        "log_ratio_abs_max": part["max_abs_log_ratio"],
        "log_ratio_update_abs_max": part["max_abs_log_ratio_update"],
        "ess_ratio_token_raw": _ess(part, "ratio", tokens),
        "ess_ratio_token_bounded": _ess(part, "weight", tokens),
    }
    metrics |= {name: part[name] / tokens for name in _DIVERGENCES}
    metrics |= {name: part[name.replace("_fraction", "")] / tokens for name in _CLIPS}
    for key, value in part.items():
        if key.startswith(REJECTED_BY):
            metrics[f"rejected_fraction_by_{key.removeprefix(REJECTED_BY)}"] = value / tokens
        if key.startswith(MEASURE):
            metrics[key.removeprefix(MEASURE)] = value / tokens
    return metrics | _trajectory_metrics(part)


def _trajectory_metrics(part: Mapping[str, float]) -> dict[str, float]:
    """None where no trajectory's oldest token lies in the bucket, though younger tokens do."""
    count = part["trajectories"]
    if count == 0.0:
        return {}
    return {
        "chi2_trajectory": part["trajectory_ratio_squared"] / count - 1.0,
        "ess_ratio_trajectory_raw": _ess(part, "trajectory_ratio", count),
        "ess_ratio_trajectory_bounded": _ess(part, "trajectory_weight", count),
    }


def _ess(part: Mapping[str, float], name: str, count: float) -> float:
    """Effective share of the items, (sum w)^2 / (n sum w^2), in [0, 1]; 0 if no weight is left."""
    squares = part[f"{name}_squared"]
    return part[name] ** 2 / (count * squares) if squares > 0.0 else 0.0


def _engine_mismatch(name: str, part: Mapping[str, float]) -> dict[str, float]:
    tokens = part.get("tokens", 0.0)
    if tokens == 0.0:
        return {}
    return {
        f"{name}_tokens": tokens,
        f"{name}_kl_k1": part["kl_k1_mu_learner"] / tokens,
        f"{name}_kl_k3": part["kl_k3_mu_learner"] / tokens,
        f"{name}_log_ratio_abs_max": part["max_abs_log_ratio"],
    }
