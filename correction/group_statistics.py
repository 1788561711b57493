"""Sums, means and ties within groups that are keyed by an explicit index, never by position.

Statistics are taken in float64, whatever the dtype of the rewards. A group whose values are all
equal is *degenerate*: centred, it is exactly 0, whatever the value. In fp32 the mean of three
times 0.1 is not 0.1, so equality is tested on the values and not on the difference.

Shapes: one value a member, [N]; group_index [N] int64, any values. Results that belong to a group
are given to each of its members: [N].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.checks import require_finite, require_floating, require_integers, require_shape
from correction.errors import InputError


@dataclass(frozen=True, slots=True)
class Groups:
    """Who belongs together. member_of: [N] int64 in [0, count); size: [N] float64, of the group."""

    member_of: Tensor
    size: Tensor
    count: int


def find_groups(group_index: Tensor) -> Groups:
    """Groups of an index [N] int64; a group of one is a group."""
    ids, member_of, sizes = torch.unique(group_index, return_inverse=True, return_counts=True)
    return Groups(member_of, sizes[member_of].double(), len(ids))


def reward_groups(rewards: Tensor, group_index: Tensor) -> Groups:
    """Groups of rewards [N]. Raises InputError for bad rewards, a bad index, or a group of one."""
    require_numbers("rewards", rewards)
    require_integers("group_index", group_index)
    require_shape("group_index", group_index, tuple(rewards.shape))
    groups = find_groups(group_index)
    lonely = group_index[groups.size < 2]
    if lonely.numel():
        raise InputError(
            f"group_index: group {int(lonely[0])} has one member; a group needs at least two"
        )
    return groups


def require_numbers(name: str, values: Tensor) -> None:
    """Raise InputError unless values are floating, [N] with N >= 1, and finite."""
    require_floating(name, values)
    if values.dim() != 1 or values.numel() == 0:
        raise InputError(f"{name}: expected shape [N] with N >= 1, got {list(values.shape)}")
    require_finite(name, values)


def group_sum(values: Tensor, groups: Groups) -> Tensor:
    """Sum over each member's group: [N] -> [N], in the dtype of values."""
    total = values.new_zeros(groups.count).index_add(0, groups.member_of, values)
    return total[groups.member_of]


def group_is_constant(values: Tensor, groups: Groups) -> Tensor:
    """Whether all values of the member's group are equal, to the bit: [N] -> [N] bool."""
    empty = values.new_zeros(groups.count)
    highest = empty.scatter_reduce(0, groups.member_of, values, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, groups.member_of, values, "amin", include_self=False)
    return (highest == lowest)[groups.member_of]


def centre(values: Tensor, groups: Groups) -> Tensor:
    """Values minus their group's mean: [N] -> [N] float64; exactly 0 in a degenerate group."""
    wide = values.detach().double()
    centred = wide - group_sum(wide, groups) / groups.size
    return centred.masked_fill(group_is_constant(wide, groups), 0.0)


def group_deviation(centred: Tensor, groups: Groups, std_ddof: int) -> Tensor:
    """Standard deviation of the member's group, from centred values [N] float64 -> [N].

    std_ddof: 0 population (divide by G), 1 unbiased (divide by G - 1, as torch.std does).
    """
    return (group_sum(centred.square(), groups) / (groups.size - std_ddof)).sqrt()
