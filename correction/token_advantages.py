"""Advantages that differ from token to token without a critic.

    reinforce_pp            whitened discounted returns                  arXiv 2501.03262
    reinforce_pp_baseline   group-centred reward, then whitened          arXiv 2501.03262
    teacher                 log teacher - log anchor, centred a row      SRPO, arXiv 2608.23493
    shared_prefix           branches of one rollout share their trunk    ARPO, arXiv 2507.19849

To *whiten* is to subtract the mean (where wanted) and divide by the deviation of the **global**
batch: of all trajectories of the optimiser step, so these functions are called before the batch
is split into micro-batches or over ranks. Two conventions are in use: the population variance
(std_ddof 0, OpenRLHF) and the unbiased one (1, verl); variance_epsilon is added to the variance.

Shapes: mask [B, T] bool, the action tokens; results [B, T], 0 at masked places, detached, in
float32 or, if an argument is, in float64; statistics in float64. All raise InputError for shapes,
dtypes, a mask without a true and non-finite values at true places.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from correction.checks import (
    require_argument,
    require_integers,
    require_mask,
    require_shape,
    require_token_rewards,
    require_tokens,
)
from correction.errors import InputError
from correction.group_statistics import centre, find_groups, require_numbers, reward_groups
from correction.masks import fill_masked
from correction.ratios import working_dtype
from correction.recurrence import reverse_recurrence
from correction.steps import StepUnit, find_steps, give_to_tokens, sum_of_steps


class WhitenUnit(StrEnum):
    """What counts once in the statistics: an action token or a trajectory."""

    TOKEN = "token"
    TRAJECTORY = "trajectory"


def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """The reward on the last action token of its trajectory: [N], mask [N, T] -> [N, T].

    A row without a true (padding) may only have the reward 0: InputError otherwise.
    """
    require_numbers("rewards", rewards)
    _require_rows(rewards, mask)
    lost = (rewards != 0) & ~mask.any(dim=-1)
    if bool(lost.any()):
        row = int(lost.nonzero()[0])
        raise InputError(f"mask: row {row} has no true, its reward {float(rewards[row])} no place")
    behind = mask.flip(-1).cumsum(dim=-1).flip(-1)  # action tokens from here on
    dtype = working_dtype(rewards)
    return fill_masked(rewards.detach().to(dtype)[:, None].expand(mask.shape), mask & (behind == 1))


def discounted_returns(token_rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Sum of gamma^k times the reward k action tokens later: [B, T] -> [B, T].

    Tool text costs no discount: masked places are skipped. gamma: in [0, 1]. A reward at a masked
    place is refused.
    """
    require_argument(0 <= gamma <= 1, "gamma", "a number in [0, 1]", gamma)
    steps = find_steps(mask, torch.zeros_like(mask, dtype=torch.int64), StepUnit.TOKEN)
    require_token_rewards("token_rewards", token_rewards, mask)
    rewards = sum_of_steps(token_rewards.detach().to(working_dtype(token_rewards)), steps)
    return give_to_tokens(reverse_recurrence(torch.full_like(rewards, gamma), rewards), steps)


def reinforce_pp_advantages(
    token_rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    std_ddof: int,
    variance_epsilon: float = 1e-8,
) -> Tensor:
    """REINFORCE++: `discounted_returns`, whitened over all action tokens of the global batch.

    token_rewards: [B, T], the reward on the last token and penalties where they arise. Where all
    returns are equal there is nothing to learn: exactly 0.
    """
    returns = discounted_returns(token_rewards, mask, gamma=gamma)
    flat = returns[mask].double()
    white = _whiten(
        flat,
        torch.ones_like(flat),
        recenter=True,
        std_ddof=std_ddof,
        variance_epsilon=variance_epsilon,
    )
    return torch.zeros_like(returns).masked_scatter(mask, white.to(returns.dtype))


def reinforce_pp_baseline_advantages(
    rewards: Tensor,
    group_index: Tensor,
    mask: Tensor,
    *,
    unit: WhitenUnit,
    recenter: bool,
    std_ddof: int,
    variance_epsilon: float = 1e-8,
) -> Tensor:
    """REINFORCE++ with the group's mean as the baseline: rewards [N], mask [N, T] -> [N, T].

    recenter: subtract the global mean as well. By token that mean is not 0 (long answers count
    more), so a group of equal rewards gets a number other than 0, as in the paper's code; without
    it such a group stays exactly 0.
    """
    centred = centre(rewards, reward_groups(rewards, group_index))
    _require_rows(rewards, mask)
    counts = mask.sum(dim=-1).double()
    if unit is WhitenUnit.TRAJECTORY:
        counts = (counts > 0).double()
    white = _whiten(
        centred, counts, recenter=recenter, std_ddof=std_ddof, variance_epsilon=variance_epsilon
    )
    return fill_masked(white.to(working_dtype(rewards))[:, None].expand(mask.shape), mask)


def teacher_advantages(teacher_logprobs: Tensor, anchor_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log teacher - log anchor of the sampled tokens, minus its mean over the trajectory.

    Both [B, T]; teacher and anchor must be of one policy version, else the difference holds drift:
    the caller's duty. A trajectory whose differences are all equal gives exactly 0.
    """
    require_mask("mask", mask)
    require_tokens("teacher_logprobs", teacher_logprobs, mask)
    require_tokens("anchor_logprobs", anchor_logprobs, mask)
    dtype = working_dtype(teacher_logprobs, anchor_logprobs)
    gain = teacher_logprobs.detach()[mask].to(dtype) - anchor_logprobs.detach()[mask].to(dtype)
    rows = mask.nonzero()[:, 0]
    centred = centre(gain, find_groups(rows)).to(dtype)
    return centred.new_zeros(mask.shape).masked_scatter(mask, centred)


def shared_prefix_advantages(advantages: Tensor, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """To tokens that several rows share the mean of these rows' advantages: [N] -> [N, T].

    segment_ids: [N, T] int64. Rows that hold the same non-negative id hold copies of the same
    sampled tokens (the trunk before a branch); ids are unique over all groups. A negative id is
    shared with nobody: the row's own advantage. Each row counts once, however long the segment.
    """
    require_numbers("advantages", advantages)
    _require_rows(advantages, mask)
    require_integers("segment_ids", segment_ids)
    require_shape("segment_ids", segment_ids, tuple(mask.shape))
    dtype = working_dtype(advantages)
    own = fill_masked(advantages.detach().to(dtype)[:, None].expand(mask.shape), mask)
    shared = mask & (segment_ids >= 0)
    if not bool(shared.any()):
        return own
    means = _segment_means(advantages.detach().double(), shared, segment_ids[shared])
    return own.masked_scatter(shared, means.to(dtype))


def _segment_means(advantages: Tensor, shared: Tensor, segments: Tensor) -> Tensor:
    """For each shared token, in order, the mean over the rows that hold its segment."""
    rows = shared.nonzero()[:, 0]
    ids, segment_of = torch.unique(segments, return_inverse=True)
    # A row counts once, however many tokens of the segment it holds.
    holders = torch.unique(segment_of * len(advantages) + rows)
    held, holder = holders // len(advantages), holders % len(advantages)
    total = advantages.new_zeros(len(ids)).index_add(0, held, advantages[holder])
    rows_of_segment = torch.bincount(held, minlength=len(ids))
    return (total / rows_of_segment)[segment_of]


def _whiten(
    values: Tensor, counts: Tensor, *, recenter: bool, std_ddof: int, variance_epsilon: float
) -> Tensor:
    """Whiten values [M] float64 that stand for counts [M] places each."""
    require_argument(std_ddof in (0, 1), "std_ddof", "0 (population) or 1 (unbiased)", std_ddof)
    require_argument(variance_epsilon >= 0, "variance_epsilon", "0 or above", variance_epsilon)
    seen, places = values[counts > 0], counts.sum()
    if bool((seen == seen[0]).all()):
        return torch.zeros_like(values)
    mean = (counts * values).sum() / places
    variance = (counts * (values - mean).square()).sum() / (places - std_ddof)
    return (values - mean if recenter else values) / (variance + variance_epsilon).sqrt()


def _require_rows(values: Tensor, mask: Tensor) -> None:
    require_mask("mask", mask)
    if len(mask) != len(values):
        raise InputError(f"mask: expected {len(values)} rows, one a trajectory, got {len(mask)}")
