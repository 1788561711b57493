"""Generalised advantage estimation, arXiv 1506.02438, per token or per turn.

    delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lambda A_(t+1)
    value target = A_t + V_t

t counts steps (`steps`): masked places are skipped, at turn level a step is a turn.

The value after the last step tells truncation from termination, and it is the caller's duty: 0
where the episode ended, V of the state that was reached where it was cut (by a length or turn
limit). A cut episode with 0 teaches that being cut is the end of the world.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.checks import (
    require_argument,
    require_finite,
    require_floating,
    require_shape,
    require_token_rewards,
    require_tokens,
)
from correction.errors import InputError
from correction.ratios import working_dtype
from correction.recurrence import reverse_recurrence
from correction.steps import (
    Steps,
    StepUnit,
    find_steps,
    first_of_steps,
    give_to_tokens,
    next_of_steps,
    sum_of_steps,
)


@dataclass(frozen=True, slots=True)
class GaeEstimate:
    """advantages and value_targets: [B, T] detached, float32 or float64, 0 at masked places."""

    advantages: Tensor
    value_targets: Tensor


def gae(
    token_rewards: Tensor,
    values: Tensor,
    bootstrap_values: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    unit: StepUnit,
    length_alpha: float = 0.0,
) -> GaeEstimate:
    """Advantages and value targets of action tokens.

    token_rewards: [B, T] floating, 0 at masked places. values: [B, T] floating, the critic's V of
    the state in which each action token was chosen. bootstrap_values: [B] floating, V of the state
    after the last action token: 0 for a terminated episode. mask: [B, T] bool. turn_ids: [B, T]
    int64, see `steps.find_steps`. gamma, gae_lambda: in [0, 1], per step.
    length_alpha: 0 is off; above 0 a trajectory of L steps has lambda = max(0, 1 - 1 /
    (length_alpha L)) instead of gae_lambda (VAPO, arXiv 2504.05118, which takes 0.05 for the
    advantages, and for the value targets a second call with lambda 1).

    Computed in float32, or float64 if an argument is. Raises InputError for shapes, dtypes, a mask
    without a true, non-finite values at true places, a reward at a masked place, parameters out of
    range and for results that overflow.
    """
    require_argument(0 <= gae_lambda <= 1, "gae_lambda", "a number in [0, 1]", gae_lambda)
    require_argument(length_alpha >= 0, "length_alpha", "0 (off) or above", length_alpha)
    steps = find_steps(mask, turn_ids, unit)
    require_episodes(token_rewards, values, bootstrap_values, steps, gamma)
    dtype = working_dtype(token_rewards, values, bootstrap_values)
    rewards = sum_of_steps(token_rewards.detach().to(dtype), steps)
    here = first_of_steps(values.detach().to(dtype), steps)
    after = next_of_steps(here, bootstrap_values.detach().to(dtype), steps)
    deltas = rewards + gamma * after - here
    decay = gamma * _lambda_of_rows(steps, gae_lambda, length_alpha, dtype)
    advantages = reverse_recurrence(decay[:, None].expand(deltas.shape), deltas)
    require_no_overflow("token_rewards, values", advantages)
    return GaeEstimate(give_to_tokens(advantages, steps), give_to_tokens(advantages + here, steps))


def require_episodes(
    token_rewards: Tensor, values: Tensor, bootstrap_values: Tensor, steps: Steps, gamma: float
) -> None:
    """Raise InputError unless rewards, values and discount are as `gae` documents them."""
    require_argument(0 <= gamma <= 1, "gamma", "a number in [0, 1]", gamma)
    require_token_rewards("token_rewards", token_rewards, steps.mask)
    require_tokens("values", values, steps.mask)
    require_floating("bootstrap_values", bootstrap_values)
    require_shape("bootstrap_values", bootstrap_values, (steps.mask.shape[0],))
    require_finite("bootstrap_values", bootstrap_values, steps.counts > 0)


def require_no_overflow(names: str, results: Tensor) -> None:
    """Raise InputError where finite arguments gave a result beyond the range of its dtype."""
    if not bool(torch.isfinite(results).all()):
        raise InputError(f"{names}: too large, the result overflows {results.dtype}")


def _lambda_of_rows(
    steps: Steps, gae_lambda: float, length_alpha: float, dtype: torch.dtype
) -> Tensor:
    lengths = steps.counts.clamp(min=1).to(dtype)
    if length_alpha > 0:
        return (1 - 1 / (length_alpha * lengths)).clamp(min=0)
    return torch.full_like(lengths, gae_lambda)
