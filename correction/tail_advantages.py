"""Advantages for prompts that are rarely solved: TailRL and its binary case, MaxRL.

    tail    arXiv 2609.02987: the objective is the integral over tau of log P(reward > tau).
            With the G rewards of a group in ascending order r_(1) <= ... <= r_(G),
            U_(k) = G x sum over j <= k of (r_(j) - r_(j-1)) / (G - j + 1),  A = U - mean of U
    maxrl   arXiv 2602.02710: rewards 0 or 1, C successes of G: A = (G - C) / C for a success, -1
            for a failure, 0 for all if nothing succeeded

The tail estimate sums to 0, does not move when all rewards shift, scales with them, gives ties
the same number, is MaxRL for binary rewards and RLOO for two members. It is not divided by a
deviation: its size grows with G, so learning rate and gradient clip have to match.

Shapes and errors as in `advantages`: rewards [N], group_index [N] -> [N] of the dtype of rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from correction.errors import InputError
from correction.group_statistics import Groups, centre, group_sum, reward_groups


def tail_advantages(
    rewards: Tensor, group_index: Tensor, *, scale_by_group_size: bool = True
) -> Tensor:
    """TailRL. scale_by_group_size: with the factor G (the paper's estimator) or without."""
    groups = reward_groups(rewards, group_index)
    tail = _tail_sums(rewards.detach().double(), groups)
    if scale_by_group_size:
        tail = tail * groups.size
    return centre(tail, groups).to(rewards.dtype)


def maxrl_advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Binary MaxRL. Raises InputError also for a reward that is neither 0 nor 1."""
    groups = reward_groups(rewards, group_index)
    solved = rewards == 1
    if bool((~solved & (rewards != 0)).any()):
        raise InputError("rewards: maxrl needs rewards of 0 or 1; for others there is tail")
    successes = group_sum(solved.double(), groups)
    # Where nothing succeeded no member is a success, and the failures are set to 0 as well.
    of_success = (groups.size - successes) / successes.clamp(min=1)
    of_failure = -(successes > 0).double()
    return torch.where(solved, of_success, of_failure).to(rewards.dtype)


def _tail_sums(rewards: Tensor, groups: Groups) -> Tensor:
    """U / G of each member, up to a constant of its group: [N] float64."""
    by_reward = rewards.argsort(stable=True)
    order = by_reward[groups.member_of[by_reward].argsort(stable=True)]
    group, size, ascending = groups.member_of[order], groups.size[order], rewards[order]
    first = torch.searchsorted(group, group)  # where the member's group begins
    rank = torch.arange(len(group), device=group.device) - first
    gaps = ascending.diff(prepend=ascending[:1])
    gaps = gaps.masked_fill(rank == 0, 0.0)  # the floor below the group shifts all alike
    # A matrix of groups keeps a large reward of one group out of the rounding of the others.
    table = gaps.new_zeros(groups.count, int(rank.max()) + 1)
    table[group, rank] = gaps / (size - rank)
    sums = torch.empty_like(rewards)
    sums[order] = table.cumsum(dim=1)[group, rank]
    return sums
