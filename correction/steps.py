"""How the action tokens of a trajectory become the steps of a decision process.

    token   every action token is a step
    turn    every turn is a step: its value is that at its first action token (the state in which
            the turn was decided), its reward the sum of its rewards, and what is computed for it
            belongs to each of its tokens

Masked places (prompt, tool and environment text, padding) belong to no step. They are skipped:
what follows the last token before a tool's reply is the first token after it, so no discount is
spent on text that the policy did not write, and no masked value is ever looked at.

Steps are packed to the left: [B, S], S the largest number of steps of a row, places without a
step hold 0. Shapes at the token side: values [B, T] floating, mask [B, T] bool.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from correction.checks import require_integers, require_mask, require_range, require_shape
from correction.errors import InputError
from correction.masks import fill_masked


class StepUnit(StrEnum):
    """What one step of the decision process is. Meaning: module docstring."""

    TOKEN = "token"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a batch.

    mask: [B, T] bool, the action tokens. starts: [B, T] bool, the first token of each step.
    step_of: [B, T] int64, the step of each action token, any valid index at masked places.
    counts: [B] int64, steps of each row. width: S.
    """

    mask: Tensor
    starts: Tensor
    step_of: Tensor
    counts: Tensor
    width: int


def find_steps(mask: Tensor, turn_ids: Tensor, unit: StepUnit) -> Steps:
    """The steps of action tokens mask [B, T] bool.

    turn_ids: [B, T] int64, told apart by value and never by gaps in the mask; in [0, T) and
    non-decreasing along a row at true places. Not looked at for tokens. Raises InputError for a
    mask without a true and for turn ids that break their rules.
    """
    require_mask("mask", mask)
    starts = mask if unit is StepUnit.TOKEN else _turn_starts(mask, turn_ids)
    started = starts.cumsum(dim=-1)
    counts = started[:, -1]
    return Steps(mask, starts, (started - 1).clamp(min=0), counts, int(counts.max()))


def sum_of_steps(values: Tensor, steps: Steps) -> Tensor:
    """Sum over the action tokens of each step: [B, T] -> [B, S]."""
    return _pack(fill_masked(values, steps.mask), steps)


def first_of_steps(values: Tensor, steps: Steps) -> Tensor:
    """What stands at the first action token of each step: [B, T] -> [B, S]."""
    return _pack(fill_masked(values, steps.starts), steps)


def step_sizes(steps: Steps, dtype: torch.dtype) -> Tensor:
    """Number of action tokens of each step: [B, S], 1 where there is no step."""
    return _pack(steps.mask.to(dtype), steps).clamp(min=1)


def next_of_steps(step_values: Tensor, after_last: Tensor, steps: Steps) -> Tensor:
    """What stands at the next step; after_last [B] for a row's last: [B, S] -> [B, S]."""
    shifted = torch.nn.functional.pad(step_values[:, 1:], (0, 1))
    after_last = torch.where(steps.counts > 0, after_last, torch.zeros_like(after_last))
    last = (steps.counts - 1).clamp(min=0)
    return shifted.scatter(1, last[:, None], after_last[:, None])


def give_to_tokens(step_values: Tensor, steps: Steps) -> Tensor:
    """To each action token what its step holds: [B, S] -> [B, T], 0 at masked places."""
    return fill_masked(step_values.gather(1, steps.step_of), steps.mask)


def _pack(filled: Tensor, steps: Steps) -> Tensor:
    empty = filled.new_zeros(filled.shape[0], steps.width)
    return empty.scatter_add(1, steps.step_of, filled)


def _turn_starts(mask: Tensor, turn_ids: Tensor) -> Tensor:
    require_integers("turn_ids", turn_ids)
    require_shape("turn_ids", turn_ids, tuple(mask.shape))
    require_range("turn_ids", turn_ids, mask, 0, mask.shape[1])
    ids = turn_ids.masked_fill(~mask, -1)
    before = torch.nn.functional.pad(ids[:, :-1], (1, 0), value=-1).cummax(dim=-1).values
    falling = mask & (ids < before)
    if bool(falling.any()):
        place = falling.nonzero()[0].tolist()
        raise InputError(f"turn_ids: must not decrease along a row, it does at {place}")
    return mask & (ids != before)
