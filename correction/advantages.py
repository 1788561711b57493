"""Advantages of whole trajectories from the rewards of their group.

With G members of one group, mean m and standard deviation s of their rewards R:

    return    A_i = R_i                                     REINFORCE, Williams 1992
    rloo      A_i = R_i - mean of the others                arXiv 2402.14740
    grpo      A_i = (R_i - m) / (s + std_epsilon)           arXiv 2402.03300
    dr_grpo   A_i = R_i - m                                 arXiv 2503.20783

Groups are keyed by an explicit index, never by position. Statistics are taken in float64. A group
whose rewards are all equal has advantage exactly 0, whatever the reward: in fp32 the mean of
three times 0.1 is not 0.1, so equality is tested on the rewards and not on the difference.

Shapes: rewards [N] floating, group_index [N] int64 (any values) -> [N] of the dtype of rewards.
All raise InputError for other shapes and dtypes, non-finite rewards and, where a group is
needed, for a group of one: it has no baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.checks import require_finite, require_floating, require_integers, require_shape
from correction.errors import InputError


@dataclass(frozen=True, slots=True)
class _Centred:
    """Rewards minus their group's mean. All [N], float64; size is that of the member's group."""

    rewards: Tensor
    size: Tensor
    member_of: Tensor
    groups: int


def return_advantages(rewards: Tensor) -> Tensor:
    """The reward itself: no baseline, any group size."""
    _check_rewards(rewards)
    return rewards.detach().clone()


def rloo_advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Reward minus the mean of the *other* members: G / (G - 1) times the centred reward."""
    centred = _centre(rewards, group_index)
    return (centred.rewards * centred.size / (centred.size - 1)).to(rewards.dtype)


def dr_grpo_advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Reward minus the group's mean, not divided by anything."""
    return _centre(rewards, group_index).rewards.to(rewards.dtype)


def grpo_advantages(
    rewards: Tensor, group_index: Tensor, *, std_ddof: int = 0, std_epsilon: float = 1e-6
) -> Tensor:
    """Centred reward over the group's standard deviation.

    std_ddof: 0 population (divide by G), 1 unbiased (divide by G - 1, as torch.std does).
    std_epsilon: added to the deviation, so that a spread of mere rounding is not blown up to 1.
    """
    if std_ddof not in (0, 1):
        raise InputError(f"std_ddof: expected 0 (population) or 1 (unbiased), got {std_ddof}")
    centred = _centre(rewards, group_index)
    squares = _group_sum(centred.rewards.square(), centred.member_of, centred.groups)
    deviation = (squares / (centred.size - std_ddof)).sqrt()
    # A degenerate group has numerator exactly 0; with std_epsilon = 0 its denominator is 0 too.
    safe = torch.where(deviation > 0, deviation + std_epsilon, torch.ones_like(deviation))
    return (centred.rewards / safe).to(rewards.dtype)


def _centre(rewards: Tensor, group_index: Tensor) -> _Centred:
    _check_rewards(rewards)
    require_integers("group_index", group_index)
    require_shape("group_index", group_index, tuple(rewards.shape))
    ids, member_of, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
    if bool((counts < 2).any()):
        lonely = int(ids[counts < 2][0])
        raise InputError(f"group_index: group {lonely} has one member; a group needs at least two")
    wide = rewards.detach().double()
    size = counts[member_of].double()
    centred = wide - _group_sum(wide, member_of, len(ids)) / size
    degenerate = _group_is_constant(wide, member_of, len(ids))
    centred = torch.where(degenerate, torch.zeros_like(centred), centred)
    return _Centred(centred, size, member_of, len(ids))


def _group_sum(values: Tensor, member_of: Tensor, groups: int) -> Tensor:
    total = values.new_zeros(groups).index_add(0, member_of, values)
    return total[member_of]


def _group_is_constant(values: Tensor, member_of: Tensor, groups: int) -> Tensor:
    empty = values.new_zeros(groups)
    highest = empty.scatter_reduce(0, member_of, values, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, member_of, values, "amin", include_self=False)
    return (highest == lowest)[member_of]


def _check_rewards(rewards: Tensor) -> None:
    require_floating("rewards", rewards)
    if rewards.dim() != 1 or rewards.numel() == 0:
        raise InputError(f"rewards: expected shape [N] with N >= 1, got {list(rewards.shape)}")
    require_finite("rewards", rewards)
