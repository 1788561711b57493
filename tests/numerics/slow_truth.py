"""The policy loss and its metrics from the definitions, in plain Python floats, one token a time.

Deliberately slow and without torch: it shares nothing with what it checks but the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from correction.composition import Recipe
from correction.surrogate_parts import Cispo, CrossEntropy, Gspo, PpoClip, Sapo
from correction.weight_parts import ProximalBehaviourWeight

Matrix = list[list[float]]


@dataclass(frozen=True)
class SlowBatch:
    """Plain lists; rows of tokens. Counts are those of the global batch."""

    target: Matrix
    proximal: Matrix
    behaviour: Matrix
    mask: list[list[bool]]
    lag: list[list[int]]
    turns: list[list[int]]
    advantages: list[float]
    action_tokens: int
    trajectories: int
    max_tokens: int

    def places(self, row: int) -> list[int]:
        """Columns of the action tokens of a row."""
        return [t for t, true in enumerate(self.mask[row]) if true]


def is_known(recipe: Recipe) -> bool:
    """Whether the definitions here cover the whole recipe; other parts have their own tests."""
    plain = not (recipe.trust or recipe.penalties) and recipe.critic.kind == "none"
    surrogates = ("ppo_clip", "gspo", "cispo", "sapo", "reinforce", "cross_entropy")
    traced = recipe.advantage.kind == "vtrace"
    return plain and not traced and recipe.surrogate.kind in surrogates


def clamped_exp(log: float) -> float:
    return math.exp(max(-20.0, min(20.0, log)))


def unit_log_ratio(logs: dict[int, float], turns: list[int], t: int, level: str) -> float:
    """Log ratio of the unit that token t belongs to."""
    if level == "token":
        return logs[t]
    unit = [k for k in logs if turns[k] == turns[t]] if level.startswith("turn") else list(logs)
    total = math.fsum(logs[k] for k in unit)
    return total / len(unit) if level.endswith("geometric") else total


def bounded(ratio: float, bound: str, low: float, high: float, a: float) -> float:
    if bound == "topr":
        return 1.0 if a > 0 else min(ratio, 1.0)
    if bound == "vespo":
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return ratio**k * math.exp(rate * (1.0 - ratio)) if ratio < 500.0 else 0.0
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


def anchor_of(recipe: Recipe, batch: SlowBatch) -> Matrix:
    """Log prox of every place."""
    kind = recipe.proximal.value
    if kind == "recompute":
        return batch.proximal
    if kind == "behaviour":
        return batch.behaviour
    anchor = [list(row) for row in batch.behaviour]
    for row, lags in enumerate(batch.lag):
        for t in batch.places(row):
            alpha = (lags[t] - 1) / lags[t] if lags[t] > 0 else 0.0
            mu = batch.behaviour[row][t]
            anchor[row][t] = mu + alpha * (batch.target[row][t] - mu)
    return anchor


def weights(recipe: Recipe, batch: SlowBatch, row: int) -> dict[int, float]:
    """Bounded weight of every action token of a row."""
    places, part = batch.places(row), recipe.weight
    if not isinstance(part, ProximalBehaviourWeight):
        return dict.fromkeys(places, 1.0)
    upper = batch.target if part.kind == "target_behaviour" else anchor_of(recipe, batch)
    logs = {t: upper[row][t] - batch.behaviour[row][t] for t in places}
    units = {t: unit_log_ratio(logs, batch.turns[row], t, part.level.value) for t in places}
    return {
        t: bounded(clamped_exp(log), part.bound.value, part.low, part.high, batch.advantages[row])
        for t, log in units.items()
    }


def token_losses(recipe: Recipe, batch: SlowBatch, row: int) -> dict[int, tuple[float, float]]:
    """Loss of every action token, and its derivative in the log of its own unit's ratio."""
    a, places = batch.advantages[row], batch.places(row)
    anchor = anchor_of(recipe, batch)
    logs = {t: batch.target[row][t] - anchor[row][t] for t in places}
    part = recipe.surrogate
    if isinstance(part, PpoClip):
        bounds = (part.clip_low, part.clip_high, part.dual_clip)
        return {t: clipped_loss(logs[t], a, *bounds) for t in places}
    if isinstance(part, Gspo):
        mean = math.fsum(logs.values()) / len(logs)
        loss = clipped_loss(mean, a, part.clip_low, part.clip_high, 0.0)
        return dict.fromkeys(places, loss)
    if isinstance(part, Cispo):
        low = 0.0 if part.clip_low >= 1 else 1 - part.clip_low
        cut = {t: min(max(clamped_exp(logs[t]), low), 1 + part.clip_high) for t in places}
        return {t: (-cut[t] * a * batch.target[row][t], -cut[t] * a) for t in places}
    if isinstance(part, Sapo):
        return {t: sapo_loss(logs[t], a, part) for t in places}
    if isinstance(part, CrossEntropy):
        return {t: (-batch.target[row][t], -1.0) for t in places}
    return {t: (-a * batch.target[row][t], -a) for t in places}


def sapo_loss(log: float, a: float, part: Sapo) -> tuple[float, float]:
    """A gate 4 sigmoid(tau (r - 1)) / tau in place of the ratio, and its derivative in log r."""
    tau = part.temperature_positive if a > 0 else part.temperature_negative
    ratio = clamped_exp(log)
    x = tau * (ratio - 1)
    gate = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    slope = 4 * gate * (1 - gate) * ratio if abs(log) <= 20.0 else 0.0
    return -a * 4 * gate / tau, -a * slope


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
