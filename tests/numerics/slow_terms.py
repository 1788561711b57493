"""What the recipes' formulas are written in: ratios, sums, advantages, losses of one token.

Plain Python, one token a time; no part of `correction` is read. Gradients are complex steps:
theta + ih is put in, and the imaginary part of the loss over h is the derivative to the last
digit. Whatever is held back from the gradient is taken of the real parts.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.numerics.slow_advantages import slow_gae, slow_steps, slow_vtrace
from tests.numerics.slow_batch import COLUMNS, LIMIT_TOKENS, PlainBatch

H = 1e-40
"""Step of the derivative; nothing cancels, so that it may be as small as numbers are."""

Loss = Callable[[int, int], complex]
Advantages = list[list[float]]


def ratio(log: complex) -> complex:
    """exp, held between e^-20 and e^20."""
    if abs(log.real) > 20:
        return complex(math.exp(math.copysign(20.0, log.real)))
    return cmath.exp(log)


def held(number: complex) -> float:
    """Without its gradient."""
    return number.real


class Slow:
    """One batch, and what all recipes are written in."""

    def __init__(self, batch: PlainBatch) -> None:
        self.b = batch
        self.rows = range(len(batch.mask))
        self.places = [[t for t, true in enumerate(row) if true] for row in batch.mask]
        self.tokens = sum(map(len, self.places))

    # Sums

    def token_mean(self, loss: Loss) -> complex:
        return sum(loss(i, t) for i in self.rows for t in self.places[i]) / self.tokens

    def sequence_mean_token_mean(self, loss: Loss) -> complex:
        means = [sum(loss(i, t) for t in self.places[i]) / len(self.places[i]) for i in self.rows]
        return sum(means) / len(means)

    def sequence_mean_token_sum(self, loss: Loss) -> complex:
        return sum(loss(i, t) for i in self.rows for t in self.places[i]) / len(self.rows)

    def constant(self, loss: Loss) -> complex:
        return self.sequence_mean_token_sum(loss) / LIMIT_TOKENS

    # Ratios

    def log(self, upper: str, lower: str, i: int, t: int) -> complex:
        a: complex = getattr(self.b, upper)[i][t]
        c: complex = getattr(self.b, lower)[i][t]
        return a - c

    def mean_log(self, upper: str, lower: str, i: int) -> complex:
        return self.sum_log(upper, lower, i) / len(self.places[i])

    def sum_log(self, upper: str, lower: str, i: int) -> complex:
        return sum((self.log(upper, lower, i, t) for t in self.places[i]), start=0j)

    def truncated(self, log: complex, high: float) -> float:
        return min(held(ratio(log)), high)

    # Advantages

    def spread(self, numbers: list[float]) -> Advantages:
        return [[number] * COLUMNS for number in numbers]

    def of_groups(
        self, rewards: list[float], estimate: Callable[[list[float]], list[float]]
    ) -> Advantages:
        out = [0.0] * len(rewards)
        for group in set(self.b.groups):
            members = [i for i in self.rows if self.b.groups[i] == group]
            made = estimate([rewards[i] for i in members])
            for i, number in zip(members, made, strict=True):
                out[i] = number
        return self.spread(out)

    def grpo(self, rewards: list[float] | None = None) -> Advantages:
        return self.of_groups(rewards or self.b.rewards, grpo_of)

    def centred(self) -> Advantages:
        return self.of_groups(self.b.rewards, centred_of)

    def token_rewards(self, sampler: str, coefficient: float) -> list[list[float]]:
        """Reward on the last token, minus the k1 of every token."""
        out = []
        for i in self.rows:
            row = [0.0] * COLUMNS
            row[self.places[i][-1]] += self.b.rewards[i]
            for t in self.places[i]:
                row[t] -= coefficient * held(self.log(sampler, "reference", i, t))
            out.append(row)
        return out

    def gae(self, rewards: list[list[float]]) -> tuple[Advantages, Advantages]:
        b, advantages, targets = self.b, [], []
        for i in self.rows:
            end = b.old_final_values[i] if b.truncated[i] else 0.0
            logs = [0.0] * COLUMNS
            steps = slow_steps(
                b.mask[i], b.turns[i], rewards[i], b.old_values[i], end, logs, "token"
            )
            row, target = slow_gae(steps, 1.0, 0.95)
            advantages.append(row)
            targets.append(target)
        return advantages, targets

    def vtrace(
        self, values: list[list[float]], ends: list[float], unit: str
    ) -> tuple[Advantages, Advantages]:
        b, targets, advantages = self.b, [], []
        rewards = self.token_rewards("mu", 0.0)
        for i in self.rows:
            logs = [held(self.log("theta", "mu", i, t)) for t in range(COLUMNS)]
            steps = slow_steps(b.mask[i], b.turns[i], rewards[i], values[i], ends[i], logs, unit)
            target, row = slow_vtrace(steps, 1.0, 1.0, 1.0, 1.0, 1.0)
            targets.append(target)
            advantages.append(row)
        return advantages, targets

    # Losses of a token

    def clip(self, log: complex, a: float, low: float, high: float, dual: float = 0.0) -> complex:
        """max(-r A, -clip(r) A), for A < 0 at most -dual A."""
        r = ratio(log)
        inside = complex(min(max(r.real, 1 - low), 1 + high))
        worse = max(-r * a, -inside * a, key=held)
        return complex(-dual * a) if dual and a < 0 and worse.real > -dual * a else worse

    def ppo(
        self, advantages: Advantages, anchor: str = "mu", high: float = 0.2, dual: float = 3.0
    ) -> Loss:
        return lambda i, t: self.clip(
            self.log("theta", anchor, i, t), advantages[i][t], 0.2, high, dual
        )

    def reinforce(self, advantages: Advantages, weight: Callable[[int, int], float]) -> Loss:
        return lambda i, t: -weight(i, t) * advantages[i][t] * self.b.theta[i][t]

    def token_weight(self, high: float) -> Callable[[int, int], float]:
        return lambda i, t: self.truncated(self.log("theta", "mu", i, t), high)

    def sequence_weight(self, high: float) -> Callable[[int, int], float]:
        return lambda i, t: self.truncated(self.sum_log("theta", "mu", i), high)

    def kl3(self, i: int, t: int) -> complex:
        away = self.log("theta", "reference", i, t)
        return cmath.exp(-away) - 1 + away

    def value_loss(self, targets: Advantages, clip: float) -> Loss:
        def loss(i: int, t: int) -> complex:
            value, old, target = self.b.values[i][t], self.b.old_values[i][t], targets[i][t]
            near = complex(min(max(held(value), old - clip), old + clip))
            plain, other = (value - target) ** 2, (near - target) ** 2
            return (other if clip and other.real > plain.real else plain) / 2

        return loss


Formula = Callable[[Slow], complex]
"""The loss of a batch."""


def centred_of(rewards: list[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [0.0 if len(set(rewards)) == 1 else reward - mean for reward in rewards]


def grpo_of(rewards: list[float]) -> list[float]:
    centred = centred_of(rewards)
    deviation = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return [c / (deviation + 1e-6) for c in centred]


def rloo_of(rewards: list[float]) -> list[float]:
    others = len(rewards) - 1
    return [reward - (math.fsum(rewards) - reward) / others for reward in rewards]


def maxrl_of(rewards: list[float]) -> list[float]:
    solved = sum(reward == 1.0 for reward in rewards)
    if not solved:
        return [0.0] * len(rewards)
    return [(len(rewards) - solved) / solved if reward == 1.0 else -1.0 for reward in rewards]


def gradient(formula: Formula, batch: PlainBatch, name: str) -> list[float]:
    """Derivatives in every number of a field of the batch, row by row, place by place."""
    grid = getattr(batch, name)
    return [slope(formula, batch, name, [path]) for path in paths(grid)]


def depends_on(formula: Formula, batch: PlainBatch, name: str) -> bool:
    """Whether the loss moves when all numbers of a field do."""
    return slope(formula, batch, name, paths(getattr(batch, name))) != 0.0


def slope(formula: Formula, batch: PlainBatch, name: str, moving: list[tuple[int, ...]]) -> float:
    """Derivative along some numbers of a field, together."""
    moved: dict[str, Any] = {name: bumped(getattr(batch, name), moving)}
    return formula(Slow(replace(batch, **moved))).imag / H


def paths(grid: object) -> list[tuple[int, ...]]:
    """Indices of all numbers of nested lists, in order."""
    if not isinstance(grid, list):
        return [()]
    return [(k, *rest) for k, entry in enumerate(grid) for rest in paths(entry)]


def bumped(grid: Any, moving: list[tuple[int, ...]]) -> Any:  # noqa: ANN401
    """The nested lists with ih added to some numbers."""
    if not isinstance(grid, list):
        return complex(grid, H) if moving else grid
    below: list[list[tuple[int, ...]]] = [[] for _ in grid]
    for k, *rest in moving:
        below[k].append(tuple(rest))
    return [bumped(*pair) for pair in zip(grid, below, strict=True)]
