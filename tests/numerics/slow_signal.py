"""The loss of every recipe of `catalogue_signal` as its paper writes it: never by its parts.

A recipe whose composition changes by accident disagrees with its line here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tests.numerics.slow_advantages import slow_returns, slow_tail, slow_whitened
from tests.numerics.slow_batch import COLUMNS, LIMIT_TOKENS
from tests.numerics.slow_terms import Advantages, Formula, Slow, held, maxrl_of, ratio, rloo_of


def plain(advantages: Callable[[Slow], Advantages]) -> Formula:
    return lambda s: s.sequence_mean_token_sum(s.reinforce(advantages(s), lambda i, t: 1.0))


def rloo(s: Slow) -> complex:
    advantages = s.of_groups(s.b.rewards, rloo_of)
    return s.sequence_mean_token_sum(s.reinforce(advantages, s.sequence_weight(2.0)))


def reinforce_pp(s: Slow) -> complex:
    """Returns of rewards with the k1 of mu to the reference, whitened over all tokens."""
    rewards = s.token_rewards("mu", 0.01)
    returns = [slow_returns(s.b.mask[i], rewards[i], 1.0) for i in s.rows]
    flat = [returns[i][t] for i in s.rows for t in s.places[i]]
    white = iter(slow_whitened(flat, [1.0] * len(flat), True, 0, 1e-8))
    advantages = [[0.0] * COLUMNS for _ in s.rows]
    for i in s.rows:
        for t in s.places[i]:
            advantages[i][t] = next(white)
    return s.token_mean(s.ppo(advantages))


def reinforce_pp_baseline(s: Slow) -> complex:
    centred = [row[0] for row in s.centred()]
    counts = [float(len(places)) for places in s.places]
    advantages = s.spread(slow_whitened(centred, counts, True, 0, 1e-8))
    kl = s.token_mean(lambda i, t: s.log("theta", "reference", i, t) ** 2 / 2)
    return s.token_mean(s.ppo(advantages)) + 0.01 * kl


def dapo(s: Slow) -> complex:
    """The last fifth of the limit costs up to 1, a cut answer 1; clip 0.2 below, 0.28 above."""
    cache = max(1, round(LIMIT_TOKENS / 5))
    cost = [max(-1.0, min(0.0, (LIMIT_TOKENS - cache - len(p)) / cache)) for p in s.places]
    shaped = [
        reward + (-1.0 if cut else penalty)
        for reward, cut, penalty in zip(s.b.rewards, s.b.truncated, cost, strict=True)
    ]
    return s.token_mean(s.ppo(s.grpo(shaped), high=0.28))


def with_critic(coefficient: float) -> Formula:
    """PPO of GAE(1, 0.95) on rewards with the k1 of mu, and half of the clipped value loss."""

    def formula(s: Slow) -> complex:
        advantages, targets = s.gae(s.token_rewards("mu", coefficient))
        critic = s.token_mean(s.value_loss(targets, 0.2))
        return s.token_mean(s.ppo(advantages)) + 0.5 * critic

    return formula


def reco(s: Slow) -> complex:
    """r = p (1 - p) / (q (1 - q)), gradient -r A w grad log theta unless r is clipped."""
    advantages = s.grpo()
    raw = [
        math.exp(-math.fsum(s.b.mu[i][t] for t in s.places[i]) / len(s.places[i])) for i in s.rows
    ]
    size = [sum(group == s.b.groups[i] for group in s.b.groups) for i in s.rows]
    w = [min(raw[i] / size[i], 5.0) for i in s.rows]
    mean = [
        math.fsum(w[k] for k in s.rows if s.b.groups[k] == s.b.groups[i]) / size[i] for i in s.rows
    ]

    def spread_of(logprob: float) -> float:
        p = min(max(math.exp(logprob), 1e-5), 1 - 1e-5)
        return p * (1 - p)

    def loss(i: int, t: int) -> complex:
        a, log = advantages[i][t] * w[i] / mean[i], s.b.theta[i][t]
        r = spread_of(held(log)) / spread_of(s.b.mu[i][t])
        if (a > 0 and r > 1.2) or (a < 0 and r < 0.8):
            return complex(-a * min(max(r, 0.8), 1.2))
        return -a * r * (1 + log - held(log))

    return s.sequence_mean_token_mean(loss)


def erpo(s: Slow) -> complex:
    surprise = dict(zip(s.b.groups, s.b.prompt_nll, strict=True))
    mean = math.fsum(surprise.values()) / len(surprise)
    weights = [min(mean / surprise[group], 2.0) for group in s.b.groups]
    advantages = [[weight * a for a in row] for weight, row in zip(weights, s.grpo(), strict=True)]
    asked = [(i, t) for i in s.rows for t in range(COLUMNS) if s.b.prompt_mask[i][t]]
    moved = [s.log("prompt_theta", "prompt_reference", i, t) for i, t in asked]
    k3 = sum(1 / ratio(x) - 1 + x for x in moved) / len(asked)
    return s.token_mean(s.ppo(advantages)) + 0.01 * k3


def srpo(s: Slow) -> complex:
    gain = [[held(s.log("teacher", "mu", i, t)) for t in range(COLUMNS)] for i in s.rows]
    mean = [math.fsum(gain[i][t] for t in s.places[i]) / len(s.places[i]) for i in s.rows]
    return s.token_mean(s.ppo([[g - mean[i] for g in gain[i]] for i in s.rows]))


def arpo(s: Slow) -> complex:
    """Rows 0 and 1 are branches of one trunk; what they share has the mean of their advantages."""
    advantages = s.grpo()
    for t in range(COLUMNS):
        held_by = [i for i in (0, 1) if s.b.segments[i][t] >= 0 and s.b.mask[i][t]]
        if held_by:
            trunk = (s.grpo()[0][0] + s.grpo()[1][0]) / 2
            for i in held_by:
                advantages[i][t] = trunk
    return s.token_mean(s.ppo(advantages))


SIGNAL_FORMULAS: Mapping[str, Formula] = {
    "reinforce": plain(lambda s: s.spread(s.b.rewards)),
    "reinforce_baseline": plain(lambda s: s.spread([r - 0.5 for r in s.b.rewards])),
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "grpo": lambda s: (
        s.sequence_mean_token_mean(s.ppo(s.grpo())) + 0.04 * s.sequence_mean_token_mean(s.kl3)
    ),
    "dr_grpo": lambda s: s.constant(s.ppo(s.centred())),
    "dapo": dapo,
    "ppo": with_critic(0.0),
    "instructgpt": with_critic(0.02),
    "tail_rl": lambda s: s.token_mean(s.ppo(s.of_groups(s.b.rewards, slow_tail))),
    "maxrl": lambda s: s.token_mean(s.ppo(s.of_groups(s.b.rewards, maxrl_of))),
    "reco": reco,
    "erpo": erpo,
    "srpo": srpo,
    "arpo": arpo,
    "dagger": lambda s: s.token_mean(lambda i, t: -s.b.theta[i][t]),
}
"""The loss of each recipe at its defaults, without what the learner adds: InstructGPT's text."""
