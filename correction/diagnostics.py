"""What a micro-batch did to the policy, as sums that add up over micro-batches and ranks.

Every quantity is summed in the bucket of its policy lag, under `name@lag=BUCKET`; `pooling` adds
the sums up and makes metrics of them, which are documented there.

Conventions. learner/mu: prox/mu where the recipe recomputes the proximal policy, else theta/mu.
Tokens lie in the bucket of their own lag, trajectories in that of their oldest token. Raw ratios
are unbounded except for the clamp of the log at +-20; act on raw figures, bounded ones always
look healthy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from correction.bounds import BoundedWeight
from correction.masks import masked_sum
from correction.pooling import (
    BUCKET_ENDS_VERSIONS,
    LAG_BUCKETS,
    MAX_PREFIX,
    MEASURE,
    REJECTED_BY,
    at_lag,
)
from correction.ratios import MAX_LOG_RATIO, Level, segment_sizes, to_ratio
from correction.surrogates import TokenLosses


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """What the diagnostics look at; all [B, T], all detached.

    log_ratios: token log theta/prox. to_behaviour: token log learner/mu. weight: what multiplied
    the surrogate, taken at weight_level. token: where the surrogate clipped. rejected: what each
    trust mask rejected, by rule. measures: figures of each token, by name.
    """

    log_ratios: Tensor
    to_behaviour: Tensor
    weight: BoundedWeight
    weight_level: Level
    token: TokenLosses
    advantages: Tensor
    mask: Tensor
    lag_versions: Tensor
    turn_ids: Tensor
    rejected: Mapping[str, Tensor]
    measures: Mapping[str, Tensor]


class _Tokens:
    """The action tokens of a mask, looked for once: tensors [B, T] become [number of tokens]."""

    def __init__(self, mask: Tensor) -> None:
        self._places = mask.flatten().nonzero()[:, 0]

    def of(self, values: Tensor) -> Tensor:
        """What stands at the action tokens, float64."""
        return values.reshape(-1).index_select(0, self._places).double()


def additive_sums(view: StepView) -> dict[str, Tensor]:
    """Sums of one micro-batch: float64 scalars, one for each quantity and bucket of lag."""
    sums: dict[str, Tensor] = {}
    quantities = _token_quantities(view)
    _bucketed(sums, quantities, quantities["lag_versions"].long())
    rows = view.mask.any(dim=-1)
    oldest = torch.where(view.mask, view.lag_versions, torch.zeros_like(view.lag_versions))
    _bucketed(sums, _trajectory_quantities(view, rows), oldest.amax(dim=-1)[rows])
    return sums


def _token_quantities(view: StepView) -> dict[str, Tensor]:
    """Quantities of each action token: [number of action tokens], float64."""
    tokens, weight = _Tokens(view.mask), view.weight
    update, away = tokens.of(view.log_ratios), tokens.of(view.to_behaviour)
    ratio, bounded, lag = to_ratio(away), tokens.of(weight.weight), tokens.of(view.lag_versions)
    quantities = {
        "tokens": torch.ones_like(away),
        "lag_versions": lag,
        "max_lag_versions": lag,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "weight": bounded,
        "weight_squared": bounded.square(),
        "weight_changed": tokens.of(weight.changed),
        "weight_rejected": tokens.of(weight.rejected),
        "log_ratio_squared": away.square(),
        "max_abs_log_ratio": away.abs(),
        "max_abs_log_ratio_update": update.abs(),
    }
    quantities |= {f"{REJECTED_BY}{k}": tokens.of(gone) for k, gone in view.rejected.items()}
    quantities |= {f"{MEASURE}{name}": tokens.of(each) for name, each in view.measures.items()}
    return quantities | _divergences(away, update) | _clip_quantities(view, tokens)


def _divergences(away: Tensor, update: Tensor) -> dict[str, Tensor]:
    """k1 and k3 of two policy pairs; tokens come from mu, so the second pair is approximate."""
    return {
        "kl_k1_mu_learner": -away,
        "kl_k3_mu_learner": _k3(away),
        "kl_k1_prox_theta": -update,
        "kl_k3_prox_theta": _k3(update),
    }


def _k3(log_ratios: Tensor) -> Tensor:
    """r - 1 - log r with r = new/old, of samples of the old policy: estimates KL(old || new)."""
    clamped = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(clamped) - clamped


def _clip_quantities(view: StepView, tokens: _Tokens) -> dict[str, Tensor]:
    sides = {
        "low": view.token.clipped_low,
        "high": view.token.clipped_high,
        "dual": view.token.clipped_dual,
    }
    advantages = tokens.of(view.advantages)
    signs = {"positive": (advantages > 0).double(), "negative": (advantages < 0).double()}
    return {
        f"clip_{side}_{sign}": tokens.of(clipped) * chosen
        for side, clipped in sides.items()
        for sign, chosen in signs.items()
    }


def _trajectory_quantities(view: StepView, rows: Tensor) -> dict[str, Tensor]:
    """Quantities of each trajectory with an action token, float64."""
    ratio = to_ratio(masked_sum(view.to_behaviour.double(), view.mask))[rows]
    bounded = _trajectory_weight(view)[rows]
    return {
        "trajectories": torch.ones_like(ratio),
        "trajectory_ratio": ratio,
        "trajectory_ratio_squared": ratio.square(),
        "trajectory_weight": bounded,
        "trajectory_weight_squared": bounded.square(),
    }


def _trajectory_weight(view: StepView) -> Tensor:
    """Product of a trajectory's bounded weights, each unit (token, turn, trajectory) once: [B]."""
    weight = view.weight.weight.double()
    sizes = segment_sizes(view.mask, view.weight_level, view.turn_ids, weight.dtype)
    logs = masked_sum(weight.clamp(min=torch.finfo(weight.dtype).tiny).log() / sizes, view.mask)
    rejected = (view.weight.rejected & view.mask).any(dim=-1)
    return to_ratio(logs).masked_fill(rejected, 0.0)


def _bucketed(sums: dict[str, Tensor], quantities: Mapping[str, Tensor], lag: Tensor) -> None:
    """Add each quantity [n] up by bucket of `lag` [n], into `sums`."""
    bucket = _buckets_of_lags(lag.device)[lag.clamp(max=BUCKET_ENDS_VERSIONS[-1] + 1)]
    added = [name for name in quantities if not name.startswith(MAX_PREFIX)]
    # One product instead of many scattered additions: fast on a GPU and always in one order.
    member = (bucket[:, None] == torch.arange(len(LAG_BUCKETS), device=lag.device)).double()
    totals = dict(
        zip(added, torch.stack([quantities[name] for name in added]) @ member, strict=True)
    )
    for name in quantities.keys() - totals.keys():
        lowest = member.new_zeros(len(LAG_BUCKETS))
        totals[name] = lowest.scatter_reduce(0, bucket, quantities[name], "amax")
    for name, total in totals.items():
        sums |= {at_lag(name, label): total[i] for i, label in enumerate(LAG_BUCKETS)}


def _buckets_of_lags(device: torch.device) -> Tensor:
    """The bucket of each lag, from 0 to the first of the last bucket: int64."""
    ends = torch.tensor(BUCKET_ENDS_VERSIONS, device=device)
    return torch.bucketize(torch.arange(BUCKET_ENDS_VERSIONS[-1] + 2, device=device), ends)
