"""Trust masks: which action tokens lie near enough to mu to be learnt from. True is keep.

With l = log pi/mu of a token, p its probability under theta and mu that under mu:

    drops tokens
    within_lag       lag above max_lag_versions, of the token or of its trajectory's oldest token
    dppo_tv          A > 0 and p - mu > high, A < 0 and p - mu < -low        arXiv 2602.04879
    dppo_kl          the same directions where binary KL(mu || p) > limit    arXiv 2602.04879
    kpop             the larger binary KL of both directions > limit         AReaL
    second_moment    the largest l^2 until the mean of the rest < limit      M2PO, 2510.01161
    drops trajectories
    geometric_band   exp(mean l) outside of [low, high]                      verl, OpenRLHF
    k3_limit         mean, sum or max of e^l - 1 - l above limit             verl; TRM, 2512.23075
    veto             any e^l < low                                           slime
    opsm             A < 0 and mean(-l) > limit                              DeepSeek-V3.2

Every function takes the *original* action mask [B, T] bool and gives a mask of the same shape for
`&`: a rule that saw only what another rule had left would take its means over another batch. Masked
places are always true, since what is no action token cannot be rejected: ~keep counts the
rejected, and a padding row never counts. What stands at masked places is never looked at.

Nothing here has a gradient; decisions are taken in float64, whatever the dtype. Bounds are on
pi / mu and its log, on both sides. Raises InputError for shapes, dtypes, a mask without a true,
non-finite values where it is true, and parameters that would reject data of ratio 1.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from correction.checks import (
    require_argument,
    require_integers,
    require_logprobs,
    require_mask,
    require_range,
    require_shape,
    require_tokens,
)
from correction.masks import fill_masked, masked_mean, masked_sum
from correction.ratios import MAX_LOG_RATIO

SMALLEST_REST = 2.0**-24
"""What is left beside a probability, 1 - p, is at least this: float32 rounds the rest away.

A logprob of exactly 0 in float32 says 1 - p < 2**-24, not 1 - p = 0, from which every other policy
would be infinitely far away.
"""


class LagUnit(StrEnum):
    """Whose lag is tested: each token's own, or that of the trajectory's oldest token."""

    TOKEN = "token"
    TRAJECTORY = "trajectory"


class Reduction(StrEnum):
    """How the divergences of a trajectory's tokens become one number."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"


def within_lag(
    lag_versions: Tensor, mask: Tensor, *, max_lag_versions: int, unit: LagUnit
) -> Tensor:
    """Keep where the policy lag is at most max_lag_versions, a whole number >= 0.

    lag_versions: [B, T] int64, learner version minus behaviour version, >= 0.
    """
    require_mask("action_mask", mask)
    require_integers("lag_versions", lag_versions)
    require_shape("lag_versions", lag_versions, tuple(mask.shape))
    require_range("lag_versions", lag_versions, mask, 0, None)
    require_argument(max_lag_versions >= 0, "max_lag_versions", ">= 0", max_lag_versions)
    late = (lag_versions > max_lag_versions) & mask
    return _drop_trajectories(late.any(dim=-1), mask) if unit == LagUnit.TRAJECTORY else ~late


def geometric_band(log_ratios: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Keep trajectories whose geometric mean ratio lies in [low, high], low <= 1 <= high.

    log_ratios: [B, T] floating, token log pi/mu, not clamped.
    """
    require_argument(0 <= low <= 1, "low", "a ratio in [0, 1]", low)
    require_argument(high >= 1, "high", "a ratio >= 1", high)
    ratio = _row_means("log_ratios", log_ratios, mask).exp()
    return _drop_trajectories((ratio < low) | (ratio > high), mask)


def k3_limit(log_ratios: Tensor, mask: Tensor, *, limit: float, reduction: Reduction) -> Tensor:
    """Keep trajectories whose k3 = e^l - 1 - l, reduced over their tokens, is at most limit >= 0.

    log_ratios: [B, T] floating, token log pi/mu; clamped to +-MAX_LOG_RATIO. The mean of k3 of
    tokens that mu sampled estimates KL(mu || pi) a token; k3 is never negative, so that neither
    the sum nor the mean lets opposite tokens cancel.
    """
    _require_limit(limit)
    logs = _wide_tokens("log_ratios", log_ratios, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    divergence = torch.expm1(logs) - logs
    if reduction == Reduction.MAX:
        reduced = divergence.amax(dim=-1)
    elif reduction == Reduction.SUM:
        reduced = masked_sum(divergence, mask)
    else:
        reduced = masked_mean(divergence, mask)
    return _drop_trajectories(reduced > limit, mask)


def veto(log_ratios: Tensor, mask: Tensor, *, low: float) -> Tensor:
    """Keep trajectories that hold no token of a ratio below `low`, in [0, 1].

    log_ratios: [B, T] floating, token log pi/mu, not clamped. One token that the policy would
    hardly choose any more makes all that follows it text of another policy.
    """
    require_argument(0 <= low <= 1, "low", "a ratio in [0, 1]", low)
    ratio = _wide_tokens("log_ratios", log_ratios, mask).exp()
    return _drop_trajectories((ratio < low).any(dim=-1), mask)


def opsm(log_ratios: Tensor, advantages: Tensor, mask: Tensor, *, limit: float) -> Tensor:
    """Keep trajectories unless A < 0 and the mean of log mu - log theta is above limit >= 0.

    log_ratios: [B, T] floating, token log theta/mu. advantages: [B, T] floating; A is their mean
    over the action tokens, which is the trajectory's own where it has one for all.
    """
    _require_limit(limit)
    distance = -_row_means("log_ratios", log_ratios, mask)
    advantage = _row_means("advantages", advantages, mask)
    return _drop_trajectories((advantage < 0) & (distance > limit), mask)


def dppo_tv(
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
) -> Tensor:
    """Drop tokens whose probability has moved too far already, the way that A pushes it.

    target_logprobs, behaviour_logprobs, advantages: [B, T] floating. low, high: largest fall and
    rise of the probability, >= 0. A token that is pushed back, or not at all, is kept.
    """
    require_argument(low >= 0, "low", "a probability >= 0", low)
    require_argument(high >= 0, "high", "a probability >= 0", high)
    rise = _wide_logprobs("target_logprobs", target_logprobs, mask).exp()
    rise = rise - _wide_logprobs("behaviour_logprobs", behaviour_logprobs, mask).exp()
    advantage = _wide_tokens("advantages", advantages, mask)
    beyond = ((advantage > 0) & (rise > high)) | ((advantage < 0) & (rise < -low))
    return ~(beyond & mask)


def dppo_kl(
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    limit: float,
) -> Tensor:
    """As `dppo_tv`, with the binary KL(mu || theta) of the token, in nats, above limit >= 0.

    Unlike a difference it is strict with small probabilities: from 0.001 to 0.101 it is 0.10, from
    0.5 to 0.6 it is 0.02.
    """
    _require_limit(limit)
    target = _wide_logprobs("target_logprobs", target_logprobs, mask)
    behaviour = _wide_logprobs("behaviour_logprobs", behaviour_logprobs, mask)
    advantage = _wide_tokens("advantages", advantages, mask)
    onwards = (target - behaviour) * advantage.sign() > 0
    beyond = onwards & (_binary_kl(behaviour, target) > limit)
    return ~(beyond & mask)


def kpop(
    target_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, limit: float
) -> Tensor:
    """Drop tokens whose binary KL, of either direction, is above limit >= 0, in nats.

    target_logprobs, behaviour_logprobs: [B, T] floating, of the learner and of mu.
    """
    _require_limit(limit)
    target = _wide_logprobs("target_logprobs", target_logprobs, mask)
    behaviour = _wide_logprobs("behaviour_logprobs", behaviour_logprobs, mask)
    larger = torch.maximum(_binary_kl(behaviour, target), _binary_kl(target, behaviour))
    return ~((larger > limit) & mask)


def second_moment(log_ratios: Tensor, mask: Tensor, *, limit: float) -> Tensor:
    """Drop the largest l^2 of the batch until the mean of the rest is below limit > 0 (strictly).

    log_ratios: [B, T] floating, token log pi/mu, not clamped. The mean is over this batch: micro-
    batches decide each for itself, and not as the whole batch would.

    Equal l^2 share their fate, whatever their order in the batch: if not all of them can be kept,
    none is. Where even the smallest l^2 is not below the limit, the smallest one is kept (all that
    are equal to it): a batch is never rejected as a whole.
    """
    require_argument(limit > 0, "limit", "> 0", limit)
    squares = _wide_tokens("log_ratios", log_ratios, mask).square()
    ordered = squares[mask].sort().values
    counts = torch.arange(1, len(ordered) + 1, dtype=ordered.dtype, device=ordered.device)
    kept_count = int((ordered.cumsum(0) / counts < limit).sum())  # means of a rising row rise
    if kept_count == len(ordered):
        return torch.ones_like(mask)
    return (squares < ordered[kept_count]) | (squares <= ordered[0]) | ~mask


def _binary_kl(first: Tensor, second: Tensor) -> Tensor:
    """KL between "this token" and "any other" under two policies, from logprobs in float64."""
    first_rest, second_rest = _rest(first), _rest(second)
    return (1 - first_rest) * (first - second) + first_rest * (first_rest / second_rest).log()


def _rest(logprobs: Tensor) -> Tensor:
    return -torch.expm1(logprobs).clamp(max=-SMALLEST_REST)


def _drop_trajectories(rejected: Tensor, mask: Tensor) -> Tensor:
    """Keep-mask [B, T] from rejected rows [B]."""
    return ~(rejected[:, None] & mask)


def _require_limit(limit: float) -> None:
    require_argument(limit >= 0, "limit", ">= 0", limit)


def _row_means(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Checked, detached; the mean over each row's action tokens: [B] float64."""
    require_mask("action_mask", mask)
    require_tokens(name, values.detach(), mask)
    return masked_mean(values.detach().double(), mask)


def _wide_tokens(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Checked, detached, float64, and 0 where masked."""
    require_mask("action_mask", mask)
    require_tokens(name, values.detach(), mask)
    return fill_masked(values.detach().double(), mask)


def _wide_logprobs(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """As `_wide_tokens`; what rounding put above 0 is 0."""
    require_mask("action_mask", mask)
    require_logprobs(name, values.detach(), mask)
    return fill_masked(values.detach().double(), mask).clamp(max=0)
