"""What an optimiser step says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from correction.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One optimiser step: whether it changed the weights, with what norm and rate.

    gradient_norm: global, before clipping; infinite or NaN where the step was refused. Logprobs
    of the model that are not finite make it so.
    """

    applied: bool
    gradient_norm: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimiser pass over a batch; the same on every rank but for the times.

    version: after the pass. reuse: how many passes the batch has served, this one included.
    loss: global. metrics: from `correction.objective.summarise`. lag_tokens, lag_trajectories:
    how many have which policy lag, measured as the pass began. reward_mean, reward_parts: over the
    trajectories of the batch, a part's over those that have it. padding_waste: share of computed
    tokens that were padding. phases_s: seconds of `collate`, `forward_backward`, `optimiser`, and
    in the first pass of `decode`, and of `score` where the recipe needs it.
    """

    version: PolicyVersion
    applied: bool
    reuse: int
    loss: float
    gradient_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    lag_tokens: Mapping[int, int]
    lag_trajectories: Mapping[int, int]
    trajectories: int
    action_tokens: int
    padding_waste: float
    reward_mean: float
    reward_parts: Mapping[str, float]
    phases_s: Mapping[str, float]
