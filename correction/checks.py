"""Checks of arguments: InputError for tensors, RecipeError for parameters, with name and rule.

What stands at masked places is never looked at: it may be anything, NaN included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from correction.errors import InputError, RecipeError


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


def require_mask(name: str, mask: Tensor) -> None:
    """`mask` is bool [B, T] and has at least one true; rows without a true are padding rows."""
    if mask.dtype != torch.bool:
        raise InputError(f"{name}: expected dtype torch.bool, got {mask.dtype}")
    if mask.dim() != 2:
        raise InputError(f"{name}: expected shape [B, T], got {list(mask.shape)}")
    if not bool(mask.any()):
        raise InputError(f"{name}: no place is true, there is nothing to learn from")


def require_finite(name: str, values: Tensor, mask: Tensor | None = None) -> None:
    """No NaN and no infinity in `values`, where `mask` (if given) is true."""
    broken = ~torch.isfinite(values)
    if mask is not None:
        broken &= mask
    if bool(broken.any()):
        place = broken.nonzero()[0].tolist()
        raise InputError(f"{name}: {int(broken.sum())} non-finite values, the first at {place}")


def require_range(name: str, values: Tensor, mask: Tensor, low: int, below: int | None) -> None:
    """Integer `values` are in [low, below) where `mask` is true; `below` None means no end."""
    broken = values < low
    if below is not None:
        broken |= values >= below
    broken &= mask
    if bool(broken.any()):
        place = broken.nonzero()[0].tolist()
        found = int(values[tuple(place)])
        rule = f">= {low}" if below is None else f"in [{low}, {below})"
        raise InputError(f"{name}: must be {rule} where the mask is true, got {found} at {place}")


def require_parameter(holds: bool, key: str, rule: str, value: float) -> None:
    """`holds`, the rule for a recipe's parameter. `key`: as in a config, below `correction`."""
    if not holds:
        raise RecipeError(f"correction.{key}: must be {rule}, got {value}")
