"""The ratio of the group level (GEPO, arXiv 2508.17850): theta over what the group expects of mu.

    p, q = exp(mean of log theta, log mu over the trajectory's action tokens)
    w = p / E, E = sum of q^2 / sum of q over the group

E is the mean of q under q itself, over the members of the group. It moves less than the single q
that other levels divide by, so w has a small variance at any lag. The price: w is 1 only where all
members are equally likely. With theta = mu it is q / E and not 1, so this level, alone among all,
is not the identity on policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from correction.checks import (
    require_finite,
    require_floating,
    require_integers,
    require_logprobs,
    require_mask,
    require_shape,
)
from correction.errors import InputError
from correction.group_statistics import Groups, find_groups, group_sum
from correction.masks import fill_masked, masked_mean
from correction.ratios import working_dtype


def log_group_expectation(behaviour_logprobs: Tensor, mask: Tensor, group_index: Tensor) -> Tensor:
    """log E of each trajectory's group: [N], detached, float32 or float64.

    behaviour_logprobs: [N, T] floating, log mu of a whole batch. mask: [N, T] bool. group_index:
    [N] int64, any values. A row without action tokens is padding: a member of no group, it gets 0.

    Computed from logs, so that answers of any length fit. Raises InputError for shapes, dtypes,
    logprobs that are not finite or above 0, and a group of one, for which E is q itself.
    """
    require_mask("action_mask", mask)
    require_logprobs("behaviour_logprobs", behaviour_logprobs.detach(), mask)
    require_integers("group_index", group_index)
    require_shape("group_index", group_index, (mask.shape[0],))
    groups, member = find_groups(group_index), mask.any(dim=-1)
    _require_siblings(member, groups, group_index)
    logs = masked_mean(behaviour_logprobs.detach().double(), mask)
    largest = _group_max(logs.masked_fill(~member, -torch.inf), groups)
    share = (logs - largest).exp().masked_fill(~member, 0.0)  # q over the group's largest q
    expectation = largest + (group_sum(share.square(), groups) / group_sum(share, groups)).log()
    return expectation.masked_fill(~member, 0.0).to(working_dtype(behaviour_logprobs))


def group_log_ratio(target_logprobs: Tensor, mask: Tensor, log_expectation: Tensor) -> Tensor:
    """log w at each action token of its trajectory: [B, T] with gradient, 0 where masked.

    target_logprobs: [B, T] floating, log theta, with gradient; each action token of n receives
    1 / n of it. mask: [B, T] bool. log_expectation: [B] floating, this micro-batch's rows of
    `log_group_expectation`; not looked at for rows without action tokens.

    Raises InputError for shapes, dtypes, logprobs that are not finite or above 0, and an
    expectation that is not finite.
    """
    require_mask("action_mask", mask)
    require_logprobs("target_logprobs", target_logprobs.detach(), mask)
    require_floating("log_expectation", log_expectation)
    require_shape("log_expectation", log_expectation, (mask.shape[0],))
    require_finite("log_expectation", log_expectation.detach(), mask.any(dim=-1))
    dtype = working_dtype(target_logprobs, log_expectation)
    difference = masked_mean(target_logprobs.to(dtype), mask) - log_expectation.detach().to(dtype)
    return fill_masked(difference[:, None].expand(mask.shape), mask)


def _group_max(values: Tensor, groups: Groups) -> Tensor:
    lowest = values.new_full((groups.count,), -torch.inf)
    return lowest.scatter_reduce(0, groups.member_of, values, "amax")[groups.member_of]


def _require_siblings(member: Tensor, groups: Groups, group_index: Tensor) -> None:
    lonely = group_index[member & (group_sum(member.double(), groups) < 2)]
    if lonely.numel():
        raise InputError(
            f"group_index: group {int(lonely[0])} has one member with action tokens; the group "
            "ratio needs at least two"
        )
