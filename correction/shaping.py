"""What to do about answers that are too long: a soft penalty in the reward, or a filter.

    overlong_penalty   0 up to max - cache, falling to -1 at max, -1 beyond    DAPO, 2503.14476
    mask_truncated     answers that were cut off leave the loss                DAPO, 2503.14476

The penalty belongs into the reward before the group's statistics are taken. The filter acts on
the mask before anything is counted: a filtered answer counts in no denominator of the loss, while
its reward, if it has one, stays in the group's baseline.
"""

from __future__ import annotations

import torch
from torch import Tensor

from correction.checks import require_bools, require_integers, require_shape
from correction.errors import InputError


def overlong_penalty(lengths_tokens: Tensor, *, max_tokens: int, cache_tokens: int) -> Tensor:
    """DAPO's soft punishment of each trajectory: [N] float64 in [-1, 0], to add to its reward.

    lengths_tokens: [N] int64, sampled tokens. max_tokens: the limit of generation.
    cache_tokens: width of the interval below it in which the penalty grows; in [1, max_tokens].
    Raises InputError for shapes, dtypes, a negative length, and limits out of range.
    """
    require_integers("lengths_tokens", lengths_tokens)
    if lengths_tokens.dim() != 1:
        raise InputError(f"lengths_tokens: expected shape [N], got {list(lengths_tokens.shape)}")
    if bool((lengths_tokens < 0).any()):
        raise InputError(f"lengths_tokens: must be >= 0, got {int(lengths_tokens.min())}")
    if not 1 <= cache_tokens <= max_tokens:
        raise InputError(
            f"cache_tokens: must be in [1, max_tokens = {max_tokens}], got {cache_tokens}"
        )
    room = (max_tokens - cache_tokens) - lengths_tokens
    return (room.double() / cache_tokens).clamp(-1.0, 0.0)


def mask_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """The action mask without the trajectories that were cut off: [N, T] bool.

    mask: [N, T] bool. truncated: [N] bool, as the engine gave it as the reason of the end; never
    guessed from a missing end-of-sequence token. Nothing may be left: the caller counts. Raises
    InputError for shapes and dtypes.
    """
    require_bools("action_mask", mask)
    require_bools("truncated", truncated)
    if mask.dim() != 2:
        raise InputError(f"action_mask: expected shape [N, T], got {list(mask.shape)}")
    require_shape("truncated", truncated, (mask.shape[0],))
    return mask & torch.logical_not(truncated)[:, None]
