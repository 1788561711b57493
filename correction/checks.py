"""Checks of arguments: InputError for tensors, RecipeError for parameters, with name and rule.

What stands at masked places is never looked at: it may be anything, NaN included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from correction.errors import InputError, RecipeError

LOGPROB_SLACK = 1e-4
"""A log-softmax in fp32 may end this far above 0 by rounding; more is a probability or a logit."""


def require_given(name: str, values: Tensor | None, needed_by: str) -> Tensor:
    """`values`, which must not be missing. `needed_by`: the method that cannot do without."""
    if values is None:
        raise InputError(f"{name}: missing, {needed_by} needs it")
    return values


def require_floating(name: str, values: Tensor) -> None:
    """`values` has a floating-point dtype."""
    if not values.is_floating_point():
        raise InputError(f"{name}: expected a floating-point dtype, got {values.dtype}")


def require_integers(name: str, values: Tensor) -> None:
    """`values` is int64, the dtype of ids, versions and indices."""
    if values.dtype != torch.int64:
        raise InputError(f"{name}: expected dtype torch.int64, got {values.dtype}")


def require_shape(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    """`values` has exactly this shape."""
    if tuple(values.shape) != shape:
        raise InputError(f"{name}: expected shape {list(shape)}, got {list(values.shape)}")


def require_bools(name: str, values: Tensor) -> None:
    """`values` is bool, the dtype of masks and flags."""
    if values.dtype != torch.bool:
        raise InputError(f"{name}: expected dtype torch.bool, got {values.dtype}")


def require_mask(name: str, mask: Tensor) -> None:
    """`mask` is bool [B, T] and has at least one true; rows without a true are padding rows."""
    require_bools(name, mask)
    if mask.dim() != 2:
        raise InputError(f"{name}: expected shape [B, T], got {list(mask.shape)}")
    if not int(mask.sum()):  # a third of the time of any() on a CPU
        raise InputError(f"{name}: no place is true, there is nothing to learn from")


def require_finite(name: str, values: Tensor, mask: Tensor | None = None) -> None:
    """No NaN and no infinity in `values`, where `mask` (if given) is true."""
    if _all_within(values, math.inf):
        return
    broken = ~torch.isfinite(values)
    if mask is not None:
        broken &= mask
    if bool(broken.any()):
        place = broken.nonzero()[0].tolist()
        raise InputError(f"{name}: {int(broken.sum())} non-finite values, the first at {place}")


def require_logprobs(name: str, values: Tensor, mask: Tensor) -> None:
    """`values` are natural logs of probabilities, of the shape of `mask`, where it is true.

    Finite and at most 0, up to LOGPROB_SLACK: a probability above 1 does not exist, and one that
    was passed without its log is always positive.
    """
    require_floating(name, values)
    require_shape(name, values, tuple(mask.shape))
    if _all_within(values, LOGPROB_SLACK):
        return
    require_finite(name, values, mask)
    positive = (values > LOGPROB_SLACK) & mask
    if bool(positive.any()):
        place = positive.nonzero()[0].tolist()
        found = float(values[tuple(place)])
        raise InputError(f"{name}: a logprob must be <= 0, got {found} at {place}")


def require_range(name: str, values: Tensor, mask: Tensor, low: int, below: int | None) -> None:
    """Integer `values` are in [low, below) where `mask` is true; `below` None means no end."""
    if values.numel():  # one pass that settles the usual case, masked places included
        lowest, highest = torch.stack(torch.aminmax(values)).tolist()
        if lowest >= low and (below is None or highest < below):
            return
    broken = values < low
    if below is not None:
        broken |= values >= below
    broken &= mask
    if bool(broken.any()):
        place = broken.nonzero()[0].tolist()
        found = int(values[tuple(place)])
        rule = f">= {low}" if below is None else f"in [{low}, {below})"
        raise InputError(f"{name}: must be {rule} where the mask is true, got {found} at {place}")


def require_tokens(name: str, values: Tensor, mask: Tensor) -> None:
    """`values` is floating, of the shape of `mask` [B, T], and finite where the mask is true."""
    require_floating(name, values)
    require_shape(name, values, tuple(mask.shape))
    require_finite(name, values, mask)


def require_token_rewards(name: str, rewards: Tensor, mask: Tensor) -> None:
    """As `require_tokens`, and exactly 0 where the mask is false.

    What a tool or the padding says is no action: a reward that was put there would be lost.
    """
    require_tokens(name, rewards, mask)
    misplaced = (rewards != 0) & ~mask
    if bool(misplaced.any()):
        place = misplaced.nonzero()[0].tolist()
        raise InputError(
            f"{name}: must be 0 where the mask is false, got {float(rewards[tuple(place)])} at "
            f"{place}; give a reward to the last action token before it"
        )


def require_argument(holds: bool, name: str, rule: str, value: float) -> None:
    """`holds`, the rule for a number that a function takes."""
    if not holds:
        raise InputError(f"{name}: expected {rule}, got {value}")


def require_parameter(holds: bool, key: str, rule: str, value: float) -> None:
    """`holds`, the rule for a recipe's parameter. `key`: as in a config, below `correction`."""
    if not holds:
        raise RecipeError(f"correction.{key}: must be {rule}, got {value}")


def _all_within(values: Tensor, high: float) -> bool:
    """Whether all of `values`, masked places too, are finite and at most `high`.

    One pass that settles the usual case, in a tenth of the time of looking at each place; NaN
    travels through the extremes.
    """
    if values.numel() == 0:
        return True
    lowest, highest = torch.stack(torch.aminmax(values.detach())).tolist()
    return math.isfinite(lowest) and math.isfinite(highest) and highest <= high
