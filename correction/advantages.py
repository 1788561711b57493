"""Advantages of whole trajectories from the rewards of their group.

With G members of one group, mean m and standard deviation s of their rewards R:

    return    A_i = R_i                                     REINFORCE, Williams 1992
    baseline  A_i = R_i - b, b the same for all             REINFORCE, Williams 1992
    rloo      A_i = R_i - mean of the others                arXiv 2402.14740
    grpo      A_i = (R_i - m) / (s + std_epsilon)           arXiv 2402.03300
    dr_grpo   A_i = R_i - m                                 arXiv 2503.20783

How a group is found, and why a group of equal rewards gives exactly 0: `group_statistics`.

Shapes: rewards [N] floating, group_index [N] int64 (any values) -> [N] of the dtype of rewards.
All raise InputError for other shapes and dtypes, non-finite rewards and, where a group is
needed, for a group of one: it has no baseline.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from correction.checks import require_argument
from correction.group_statistics import centre, group_deviation, require_numbers, reward_groups


def return_advantages(rewards: Tensor) -> Tensor:
    """The reward itself: no baseline, any group size."""
    require_numbers("rewards", rewards)
    return rewards.detach().clone()


def baseline_advantages(rewards: Tensor, *, baseline: float) -> Tensor:
    """Reward minus a constant, in units of the reward; finite. No group is looked at.

    The constant must not depend on the actions of this batch: a moving average of *earlier*
    rewards is right, the mean of these rewards is not (that is `rloo`).
    """
    require_numbers("rewards", rewards)
    require_argument(math.isfinite(baseline), "baseline", "finite", baseline)
    return rewards.detach() - baseline


def rloo_advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Reward minus the mean of the *other* members: G / (G - 1) times the centred reward."""
    groups = reward_groups(rewards, group_index)
    centred = centre(rewards, groups)
    return (centred * groups.size / (groups.size - 1)).to(rewards.dtype)


def dr_grpo_advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Reward minus the group's mean, not divided by anything."""
    return centre(rewards, reward_groups(rewards, group_index)).to(rewards.dtype)


def grpo_advantages(
    rewards: Tensor, group_index: Tensor, *, std_ddof: int = 0, std_epsilon: float = 1e-6
) -> Tensor:
    """Centred reward over the group's standard deviation.

    std_ddof: 0 population (divide by G), 1 unbiased (divide by G - 1, as torch.std does).
    std_epsilon: added to the deviation, so that a spread of mere rounding is not blown up to 1.
    """
    require_argument(std_ddof in (0, 1), "std_ddof", "0 (population) or 1 (unbiased)", std_ddof)
    groups = reward_groups(rewards, group_index)
    centred = centre(rewards, groups)
    deviation = group_deviation(centred, groups, std_ddof)
    # A degenerate group has numerator exactly 0; with std_epsilon = 0 its denominator is 0 too.
    safe = torch.where(deviation > 0, deviation + std_epsilon, torch.ones_like(deviation))
    return (centred / safe).to(rewards.dtype)
