"""Batches as the episodes that RLlib and torchrl know: no masks, no tool text, whole rows.

A row's steps are packed to its left, one by one in plain Python, so that our own packing is
checked by it. A step is an action token, or a turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.steps import StepUnit
from tests.numerics.peers.peer_batches import PeerBatch


@dataclass(frozen=True)
class Episodes:
    """Steps [B, S], left aligned; what stands behind a row's last step is not to be looked at.

    log_ratios: summed over the step, or averaged where asked. first: place [B, S] of the step's
    first token. real: bool [B, S], there is such a step. bootstrap: [B], 0 where the episode
    ended, and cut: [B] bool, it was cut instead.
    """

    log_ratios: Tensor
    rewards: Tensor
    values: Tensor
    first: Tensor
    real: Tensor
    bootstrap: Tensor
    cut: Tensor

    @property
    def last(self) -> Tensor:
        """Whether a step is its row's last: [B, S] bool."""
        behind = torch.nn.functional.pad(self.real[:, 1:], (0, 1))
        return self.real & ~behind

    @property
    def next_values(self) -> Tensor:
        """V of the state after each step: [B, S]."""
        shifted = torch.nn.functional.pad(self.values[:, 1:], (0, 1))
        return torch.where(self.last, self.bootstrap[:, None], shifted)

    def of(self, tokens: Tensor) -> Tensor:
        """What stands at the first token of each step, of all real steps in order: [n]."""
        return tokens.gather(1, self.first)[self.real]


def episodes_of(batch: PeerBatch, unit: StepUnit, *, mean: bool = False) -> Episodes:
    """The steps of a batch; every second row was cut. mean: a turn's log ratio is its tokens'."""
    rows = [_steps_of_row(batch, row, unit) for row in range(batch.mask.shape[0])]
    width = max(1, *(len(steps) for steps in rows))
    shape = (len(rows), width)
    logs = batch.target - batch.behaviour
    packed = {name: torch.zeros(shape, dtype=logs.dtype) for name in ("logs", "rewards", "values")}
    first, real = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for row, steps in enumerate(rows):
        for number, places in enumerate(steps):
            total = logs[row, places].sum()
            packed["logs"][row, number] = total / len(places) if mean else total
            packed["rewards"][row, number] = batch.token_rewards[row, places].sum()
            packed["values"][row, number] = batch.values[row, places[0]]
            first[row, number], real[row, number] = places[0], True
    cut = torch.arange(len(rows)) % 2 == 0
    bootstrap = torch.where(cut, batch.advantages, torch.zeros_like(batch.advantages))
    return Episodes(
        packed["logs"], packed["rewards"], packed["values"], first, real, bootstrap, cut
    )


def _steps_of_row(batch: PeerBatch, row: int, unit: StepUnit) -> list[list[int]]:
    """Places of the action tokens of each step."""
    places = batch.mask[row].nonzero()[:, 0].tolist()
    if unit is StepUnit.TOKEN:
        return [[place] for place in places]
    turns: dict[int, list[int]] = {}
    for place in places:
        turns.setdefault(int(batch.turns[row, place]), []).append(place)
    return list(turns.values())
