"""V-trace targets and policy-gradient advantages, arXiv 1802.01561, per token or per turn.

With w = theta / mu of a step, rho = min(rho_bar, w), c = lambda min(c_bar, w):

    delta_t   = rho_t (r_t + gamma V_(t+1) - V_t)
    v_t - V_t = delta_t + gamma c_t (v_(t+1) - V_(t+1))
    A_t       = min(pg_rho_bar, w_t) (r_t + gamma v_(t+1) - V_t)

t counts steps (`steps`): masked places are skipped, at turn level a step is a turn. After the
last step both V and v are the bootstrap value: 0 where the episode ended, V of the state that was
reached where it was cut; the caller's duty.

rho_bar sets *what* is learnt: the fixed point is the value of the policy proportional to
min(rho_bar mu, theta). c_bar sets only how fast. The advantage already holds its bounded ratio:
it goes into the plain policy gradient -A log theta, with no weight and no PPO clip on top.

With a constant in place of a critic, a reward at the end, and bars of 1, the advantage of token t
is (R - b) times the product of min(1, w) over t and everything after it: it decays with length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.checks import require_argument, require_tokens
from correction.errors import InputError
from correction.gae import require_episodes, require_no_overflow
from correction.ratios import Level, to_ratio, working_dtype
from correction.recurrence import reverse_recurrence
from correction.steps import (
    Steps,
    StepUnit,
    find_steps,
    first_of_steps,
    give_to_tokens,
    next_of_steps,
    step_sizes,
    sum_of_steps,
)


@dataclass(frozen=True, slots=True)
class TraceBounds:
    """Bounds on the ratio of a step; infinity is no bound.

    rho_bar: of the temporal difference. c_bar: of the trace, at most rho_bar. pg_rho_bar: of the
    advantage. trace_lambda: in [0, 1], multiplies the trace. Raises InputError otherwise.
    """

    rho_bar: float = 1.0
    c_bar: float = 1.0
    pg_rho_bar: float = 1.0
    trace_lambda: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rho_bar", "c_bar", "pg_rho_bar"):
            value = getattr(self, name)
            require_argument(value > 0, name, "a number above 0", value)
        within = self.c_bar <= self.rho_bar
        require_argument(within, "c_bar", f"at most rho_bar ({self.rho_bar})", self.c_bar)
        unit = 0 <= self.trace_lambda <= 1
        require_argument(unit, "trace_lambda", "a number in [0, 1]", self.trace_lambda)


@dataclass(frozen=True, slots=True)
class VtraceEstimate:
    """All [B, T], detached, float32 or float64; a step's number stands at each of its tokens.

    value_targets: v. advantages: for the plain policy gradient. ratios: w, before any bound.
    rho: min(rho_bar, w). All are 0 at masked places.
    """

    value_targets: Tensor
    advantages: Tensor
    ratios: Tensor
    rho: Tensor


def vtrace(
    log_ratios: Tensor,
    token_rewards: Tensor,
    values: Tensor,
    bootstrap_values: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    gamma: float,
    unit: StepUnit,
    trace_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    turn_level: Level = Level.TURN_GEOMETRIC,
) -> VtraceEstimate:
    """Value targets and advantages of action tokens that mu sampled, for the policy theta.

    log_ratios: [B, T] floating, log theta - log mu of each token, of any size (a step's is clamped
    to +-MAX_LOG_RATIO). The other tensors are those of `gae.gae`. gamma: in [0, 1], per step.
    trace_lambda and the bars: see `TraceBounds`; infinity is allowed. turn_level: `turn_product`
    or `turn_geometric`, how the tokens of a turn make its ratio; not looked at for tokens.

    Computed in float32, or float64 if an argument is. Raises InputError for shapes, dtypes, a mask
    without a true, non-finite values at true places, a reward at a masked place, parameters out of
    range and for results that overflow, as unbounded traces may.
    """
    bounds = TraceBounds(rho_bar, c_bar, pg_rho_bar, trace_lambda)
    steps = find_steps(mask, turn_ids, unit)
    require_tokens("log_ratios", log_ratios, mask)
    require_episodes(token_rewards, values, bootstrap_values, steps, gamma)
    dtype = working_dtype(log_ratios, token_rewards, values, bootstrap_values)
    ratios = _ratios_of_steps(log_ratios.detach().to(dtype), steps, turn_level)
    rewards = sum_of_steps(token_rewards.detach().to(dtype), steps)
    here = first_of_steps(values.detach().to(dtype), steps)
    after = next_of_steps(here, bootstrap_values.detach().to(dtype), steps)
    discounts = torch.full_like(here, gamma)
    targets, advantages = trace_steps(ratios, rewards, discounts, here, after, bounds)
    require_no_overflow("log_ratios, token_rewards, values", targets + advantages)
    found = (targets, advantages, ratios, ratios.clamp(max=rho_bar))
    return VtraceEstimate(*(give_to_tokens(each, steps) for each in found))


def trace_steps(
    ratios: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    next_values: Tensor,
    bounds: TraceBounds,
) -> tuple[Tensor, Tensor]:
    """Value targets and advantages of steps that are packed already: all [B, S], one dtype.

    discounts: gamma of each step, 0 where an episode ends. next_values: V of the state after each
    step, the bootstrap value at a row's last. Behind it a row holds zeros.
    """
    delta = ratios.clamp(max=bounds.rho_bar) * (rewards + discounts * next_values - values)
    trace = discounts * bounds.trace_lambda * ratios.clamp(max=bounds.c_bar)
    correction = reverse_recurrence(trace, delta)  # v_t - V_t
    next_targets = next_values + torch.nn.functional.pad(correction[:, 1:], (0, 1))
    advantages = rewards + discounts * next_targets - values
    return values + correction, ratios.clamp(max=bounds.pg_rho_bar) * advantages


def _ratios_of_steps(log_ratios: Tensor, steps: Steps, turn_level: Level) -> Tensor:
    if turn_level not in (Level.TURN_PRODUCT, Level.TURN_GEOMETRIC):
        raise InputError(f"turn_level: expected turn_product or turn_geometric, got {turn_level}")
    total = sum_of_steps(log_ratios, steps)
    if turn_level is Level.TURN_GEOMETRIC:
        total = total / step_sizes(steps, total.dtype)
    return to_ratio(total)
