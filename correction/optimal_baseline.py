"""The baseline that minimises the variance of an off-policy policy gradient (VCPO's OPOB).

    b* = sum of w^2 |g|^2 R / sum of w^2 |g|^2     over the group, arXiv 2602.17616
    A_i = R_i - b*

w is the importance weight of a trajectory and g the gradient of its log probability. The mean
reward is the best baseline only where all w |g| are equal: long answers and large weights pull.
"""

from __future__ import annotations

import torch
from torch import Tensor

from correction.checks import require_finite, require_floating, require_shape
from correction.errors import InputError
from correction.group_statistics import centre, group_sum, reward_groups


def opob_advantages(
    rewards: Tensor, group_index: Tensor, weights: Tensor, squared_norms: Tensor
) -> Tensor:
    """Reward minus the optimal baseline of its group: [N] of the dtype of rewards.

    rewards: [N] floating. group_index: [N] int64. weights: [N] floating, importance weights >= 0,
    bounded as the loss bounds them. squared_norms: [N] floating, |g|^2 >= 0.
    A group in which every w |g| is 0 moves nothing, whatever its baseline: it gets the plain mean.
    A group of equal rewards gives exactly 0. Raises InputError as `advantages` does, and for
    weights or norms that are negative or not finite.
    """
    groups = reward_groups(rewards, group_index)
    for name, values in (("weights", weights), ("squared_norms", squared_norms)):
        _require_shares(name, values, rewards)
    centred = centre(rewards, groups)
    pull = weights.detach().double().square() * squared_norms.detach().double()
    total = group_sum(pull, groups)
    # b* minus the mean: taken on centred rewards it is exactly 0 for equal rewards.
    shift = group_sum(pull * centred, groups) / torch.where(total > 0, total, 1.0)
    return (centred - shift).to(rewards.dtype)


def _require_shares(name: str, values: Tensor, rewards: Tensor) -> None:
    require_floating(name, values)
    require_shape(name, values, tuple(rewards.shape))
    require_finite(name, values)
    if bool((values < 0).any()):
        raise InputError(f"{name}: must be >= 0, got {float(values.min())}")
