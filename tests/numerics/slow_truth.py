"""The policy loss and its metrics from the definitions, in plain Python floats, one token a time.

Deliberately slow and without torch: it shares nothing with what it checks but the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from correction.composition import Recipe
from correction.surrogate_parts import Gspo, PpoClip
from correction.weight_parts import ProximalBehaviourWeight

Matrix = list[list[float]]


@dataclass(frozen=True)
class SlowBatch:
    """Plain lists; rows of tokens. Counts are those of the global batch."""

    target: Matrix
    proximal: Matrix
    behaviour: Matrix
    mask: list[list[bool]]
    turns: list[list[int]]
    advantages: list[float]
    action_tokens: int
    trajectories: int
    max_tokens: int

    def places(self, row: int) -> list[int]:
        """Columns of the action tokens of a row."""
        return [t for t, true in enumerate(self.mask[row]) if true]


def clamped_exp(log: float) -> float:
    return math.exp(max(-20.0, min(20.0, log)))


def unit_log_ratio(logs: dict[int, float], turns: list[int], t: int, level: str) -> float:
    """Log ratio of the unit that token t belongs to."""
    if level == "token":
        return logs[t]
    unit = [k for k in logs if turns[k] == turns[t]] if level.startswith("turn") else list(logs)
    total = math.fsum(logs[k] for k in unit)
    return total / len(unit) if level.endswith("geometric") else total


def bounded(ratio: float, bound: str, low: float, high: float) -> float:
    if bound == "truncate":
        return min(ratio, high)
    if bound == "clip":
        return min(max(ratio, low), high)
    if bound == "band":
        return ratio if low <= ratio <= high else 0.0
    return ratio


def clipped_loss(log: float, a: float, low: float, high: float, dual: float) -> tuple[float, float]:
    """Loss and its derivative in the log ratio, from the max / min form of the papers."""
    ratio = clamped_exp(log)
    inside = min(max(ratio, 1 - low), 1 + high)
    slope = -ratio * a if abs(log) <= 20.0 else 0.0
    loss, slope = (-ratio * a, slope) if -ratio * a >= -inside * a else (-inside * a, 0.0)
    if dual > 0 and a < 0 and loss > -dual * a:
        return -dual * a, 0.0
    return loss, slope


def weights(recipe: Recipe, batch: SlowBatch, row: int) -> dict[int, float]:
    """Bounded weight of every action token of a row."""
    places, part = batch.places(row), recipe.weight
    if not isinstance(part, ProximalBehaviourWeight):
        return dict.fromkeys(places, 1.0)
    upper = batch.target if part.kind == "target_behaviour" else batch.proximal
    logs = {t: upper[row][t] - batch.behaviour[row][t] for t in places}
    units = {t: unit_log_ratio(logs, batch.turns[row], t, part.level.value) for t in places}
    return {
        t: bounded(clamped_exp(log), part.bound.value, part.low, part.high)
        for t, log in units.items()
    }


def token_losses(recipe: Recipe, batch: SlowBatch, row: int) -> dict[int, tuple[float, float]]:
    """Loss of every action token, and its derivative in the log of its own unit's ratio."""
    a, places = batch.advantages[row], batch.places(row)
    anchor = batch.behaviour if recipe.proximal.value == "behaviour" else batch.proximal
    logs = {t: batch.target[row][t] - anchor[row][t] for t in places}
    part = recipe.surrogate
    if isinstance(part, PpoClip):
        bounds = (part.clip_low, part.clip_high, part.dual_clip)
        return {t: clipped_loss(logs[t], a, *bounds) for t in places}
    if isinstance(part, Gspo):
        mean = math.fsum(logs.values()) / len(logs)
        loss = clipped_loss(mean, a, part.clip_low, part.clip_high, 0.0)
        return dict.fromkeys(places, loss)
    return {t: (-a * batch.target[row][t], -a) for t in places}


def token_share(recipe: Recipe, batch: SlowBatch, row: int) -> float:
    """What one token's weighted loss is multiplied by."""
    kind = recipe.aggregation.value
    if kind == "token_mean":
        return 1 / batch.action_tokens
    if kind == "sequence_mean_token_mean":
        return 1 / batch.trajectories / len(batch.places(row))
    if kind == "sequence_mean_token_sum":
        return 1 / batch.trajectories
    if kind == "constant":
        return 1 / (batch.trajectories * batch.max_tokens)
    return 1.0


def loss_and_gradient(recipe: Recipe, batch: SlowBatch) -> tuple[float, Matrix]:
    """The loss and its gradient in every target logprob."""
    terms: list[float] = []
    gradient = [[0.0] * len(row) for row in batch.mask]
    for row in range(len(batch.mask)):
        places = batch.places(row)
        if not places:
            continue
        share, weight = token_share(recipe, batch, row), weights(recipe, batch, row)
        losses = token_losses(recipe, batch, row)
        terms += [share * weight[t] * losses[t][0] for t in places]
        slopes = {t: share * weight[t] * losses[t][1] for t in places}
        for t in places:
            if isinstance(recipe.surrogate, Gspo):  # every token moves the one shared ratio
                gradient[row][t] = math.fsum(slopes.values()) / len(places)
            else:
                gradient[row][t] = slopes[t]
    return math.fsum(terms), gradient
