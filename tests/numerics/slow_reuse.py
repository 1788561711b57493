"""The loss of every recipe of `catalogue_reuse` as its paper writes it: never by its parts.

A recipe whose composition changes by accident disagrees with its line here.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping

from tests.numerics.slow_advantages import slow_opob
from tests.numerics.slow_batch import COLUMNS
from tests.numerics.slow_terms import Formula, Loss, Slow, held, ratio, rloo_of


def times(weight: Callable[[int, int], float], loss: Loss) -> Loss:
    return lambda i, t: weight(i, t) * loss(i, t)


def decoupled(high: float) -> Formula:
    """sg(min(prox/mu, high)) PPO(theta/prox)"""

    def formula(s: Slow) -> complex:
        return s.token_mean(
            times(
                lambda i, t: s.truncated(s.log("prox", "mu", i, t), high), s.ppo(s.grpo(), "prox")
            )
        )

    return formula


def icepop(s: Slow) -> complex:
    def weight(i: int, t: int) -> float:
        w = held(ratio(s.log("prox", "mu", i, t)))
        return w if 0.5 <= w <= 5.0 else 0.0

    return s.token_mean(times(weight, s.ppo(s.grpo(), "prox")))


def geometric_rejection(s: Slow) -> complex:
    def weight(i: int, t: int) -> float:
        mean = math.exp(held(s.mean_log("prox", "mu", i)))
        return s.truncated(s.log("prox", "mu", i, t), 2.0) if 0.98 <= mean <= 1.02 else 0.0

    return s.token_mean(times(weight, s.ppo(s.grpo(), "prox")))


def a3po(s: Slow) -> complex:
    """log prox = log mu + (1 - 1 / lag) (log theta - log mu)"""
    advantages = s.grpo()

    def loss(i: int, t: int) -> complex:
        lag = max(1, s.b.lag[i][t])
        away = s.log("theta", "mu", i, t)
        prox = (1 - 1 / lag) * held(away)
        weight = s.truncated(complex(prox), 5.0)
        return weight * s.clip(away - prox, advantages[i][t], 0.2, 0.2, 3.0)

    return s.token_mean(loss)


def gspo(s: Slow) -> complex:
    advantages = s.grpo()
    return s.sequence_mean_token_mean(
        lambda i, t: s.clip(s.mean_log("theta", "mu", i), advantages[i][t], 3e-4, 4e-4)
    )


def decoupled_gspo(s: Slow) -> complex:
    advantages = s.grpo()

    def loss(i: int, t: int) -> complex:
        weight = s.truncated(s.mean_log("prox", "mu", i), 2.0)
        return weight * s.clip(s.mean_log("theta", "prox", i), advantages[i][t], 3e-4, 4e-4)

    return s.sequence_mean_token_mean(loss)


def gepo(s: Slow) -> complex:
    advantages = s.grpo()
    q = [math.exp(math.fsum(s.b.mu[i][t] for t in s.places[i]) / len(s.places[i])) for i in s.rows]

    def loss(i: int, t: int) -> complex:
        siblings = [q[k] for k in s.rows if s.b.groups[k] == s.b.groups[i]]
        expected = math.fsum(x * x for x in siblings) / math.fsum(siblings)
        mean = sum((s.b.theta[i][k] for k in s.places[i]), start=0j) / len(s.places[i])
        return s.clip(mean - math.log(expected), advantages[i][t], 0.2, 0.2)

    return s.sequence_mean_token_mean(loss)


def sapo(s: Slow) -> complex:
    advantages = s.grpo()

    def loss(i: int, t: int) -> complex:
        a = advantages[i][t]
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + cmath.exp(-tau * (ratio(s.log("theta", "mu", i, t)) - 1)))
        return -a * 4 / tau * gate

    return s.sequence_mean_token_mean(loss)


def topr(s: Slow) -> complex:
    advantages = s.centred()

    def weight(i: int, t: int) -> float:
        return 1.0 if advantages[i][t] > 0 else s.truncated(s.sum_log("theta", "mu", i), 1.0)

    return s.sequence_mean_token_sum(s.reinforce(advantages, weight))


def vespo(s: Slow) -> complex:
    advantages = s.grpo()

    def weight(i: int, t: int) -> float:
        w = held(ratio(s.sum_log("theta", "mu", i)))
        k, rate = (2, 3) if advantages[i][t] >= 0 else (3, 2)
        return float(w**k * math.exp(rate * (1 - w)))

    return s.sequence_mean_token_mean(s.reinforce(advantages, weight))


def m2po(s: Slow) -> complex:
    """The largest (log prox/mu)^2 of the batch leave until the mean of the rest is below 0.04."""
    squares = {(i, t): held(s.log("prox", "mu", i, t)) ** 2 for i in s.rows for t in s.places[i]}
    kept = sorted(squares, key=squares.__getitem__)
    while len(kept) > 1 and math.fsum(squares[place] for place in kept) / len(kept) >= 0.04:
        kept.pop()
    keep = set(kept)
    near = s.token_weight(5.0)
    return s.token_mean(s.reinforce(s.grpo(), lambda i, t: near(i, t) if (i, t) in keep else 0.0))


def dppo(s: Slow) -> complex:
    advantages, near = s.centred(), s.token_weight(20.0)

    def weight(i: int, t: int) -> float:
        rise = math.exp(held(s.b.theta[i][t])) - math.exp(s.b.mu[i][t])
        a = advantages[i][t]
        beyond = (a > 0 and rise > 0.2) or (a < 0 and rise < -0.2)
        return 0.0 if beyond else near(i, t)

    pull = s.token_mean(lambda i, t: 1e-3 * s.log("theta", "mu", i, t) ** 2)
    return s.token_mean(s.reinforce(advantages, weight)) + pull


def vcpo(s: Slow) -> complex:
    """b = sum of w^2 n R / sum of w^2 n over the group, n the length."""
    out = [0.0] * len(s.rows)
    for group in set(s.b.groups):
        members = [i for i in s.rows if s.b.groups[i] == group]
        weights = [s.truncated(s.sum_log("prox", "mu", i), 8.0) for i in members]
        lengths = [float(len(s.places[i])) for i in members]
        made = slow_opob([s.b.rewards[i] for i in members], weights, lengths)
        for i, number in zip(members, made, strict=True):
            out[i] = number
    return s.sequence_mean_token_sum(s.reinforce(s.spread(out), s.sequence_weight(8.0)))


def deepseek_v32(s: Slow) -> complex:
    advantages = s.grpo()

    def keep(i: int, t: int) -> float:
        return float(not (advantages[i][t] < 0 and -held(s.mean_log("theta", "mu", i)) > 0.5))

    def kl(i: int, t: int) -> complex:
        return 0.04 * ratio(s.log("theta", "mu", i, t)) * s.kl3(i, t)

    policy = s.sequence_mean_token_mean(times(keep, s.ppo(advantages)))
    return policy + s.sequence_mean_token_mean(kl)


def score_centering(s: Slow) -> complex:
    advantages, near = s.centred(), s.token_weight(2.0)

    def loss(i: int, t: int) -> complex:
        logs, mus = s.b.head_theta[i][t], [math.exp(x) for x in s.b.head_mu[i][t]]
        thetas = [math.exp(held(x)) for x in logs]
        rho = max(1 - math.fsum(mus), 1e-6) / max(1 - math.fsum(thetas), 1e-6)
        alpha = rho * min(1 / rho, 2.0)
        drift = sum(
            (mu * min(theta / mu, 2.0) - alpha * theta) * log
            for mu, theta, log in zip(mus, thetas, logs, strict=True)
        )
        return -advantages[i][t] * (near(i, t) * s.b.theta[i][t] - drift)

    return s.token_mean(loss)


def vtrace(s: Slow) -> complex:
    """V is the mean of the siblings, a step is a turn with the geometric mean of its ratios."""
    lead = s.of_groups(s.b.rewards, rloo_of)
    values = [[s.b.rewards[i] - lead[i][0]] * COLUMNS for i in s.rows]
    advantages, _ = s.vtrace(values, [0.0] * len(s.rows), "turn_geometric")
    return s.token_mean(s.reinforce(advantages, lambda i, t: 1.0))


def impala(s: Slow) -> complex:
    """V is the critic's newest, a step is a token; 1/2 (V - target)^2 with 1/2, entropy 1e-3."""
    values = [[held(value) for value in row] for row in s.b.values]
    cut = [end if gone else 0.0 for end, gone in zip(s.b.final_values, s.b.truncated, strict=True)]
    advantages, targets = s.vtrace(values, cut, "token")
    policy = s.token_mean(s.reinforce(advantages, lambda i, t: 1.0))
    critic = s.token_mean(s.value_loss(targets, 0.0))
    return policy + 0.5 * critic - 1e-3 * s.token_mean(lambda i, t: s.b.entropy[i][t])


def sequence_tis(s: Slow) -> complex:
    return s.sequence_mean_token_sum(s.reinforce(s.centred(), s.sequence_weight(2.0)))


REUSE_FORMULAS: Mapping[str, Formula] = {
    "decoupled_ppo": decoupled(5.0),
    "ppo_bypass": lambda s: s.token_mean(s.ppo(s.grpo())),
    "tis": decoupled(2.0),
    "icepop": icepop,
    "geometric_rejection": geometric_rejection,
    "sequence_tis": sequence_tis,
    "a3po": a3po,
    "gspo": gspo,
    "decoupled_gspo": decoupled_gspo,
    "gepo": gepo,
    "cispo": lambda s: s.token_mean(s.reinforce(s.grpo(), s.token_weight(5.0))),
    "sapo": sapo,
    "aipo": lambda s: s.token_mean(s.reinforce(s.centred(), s.token_weight(5.0))),
    "topr": topr,
    "vespo": vespo,
    "m2po": m2po,
    "dppo": dppo,
    "vcpo": vcpo,
    "deepseek_v32": deepseek_v32,
    "score_centering": score_centering,
    "vtrace": vtrace,
    "impala": impala,
    "none": lambda s: s.token_mean(s.reinforce(s.grpo(), lambda i, t: 1.0)),
}
"""The loss of each recipe at its defaults."""
