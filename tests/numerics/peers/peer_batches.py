"""Random batches for the comparison: ragged, with tool gaps, padding rows and degenerate groups.

Everything follows from the seed, which a failure names. Sizes go from one token to 32 x 256; log
ratios from nearly none to a factor of e**4 a token. What stands at masked places is finite, since
some peers multiply by the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from correction.aggregation import Denominators, count_denominators

SEED = 26_030_000
BATCHES = 2000
SPREADS = (0.02, 0.3, 1.2)
LARGE_EVERY = 250
MAX_TOKENS = 300


@dataclass(frozen=True)
class PeerBatch:
    """Tensors [B, T], but rewards, advantages and group_index [B]. float_mask: for the peers."""

    seed: int
    target: Tensor
    proximal: Tensor
    behaviour: Tensor
    reference: Tensor
    values: Tensor
    token_rewards: Tensor
    rewards: Tensor
    advantages: Tensor
    group_index: Tensor
    mask: Tensor
    turns: Tensor
    lag: Tensor

    @property
    def float_mask(self) -> Tensor:
        """The mask as numbers of the batch's dtype."""
        return self.mask.to(self.target.dtype)

    @property
    def token_advantages(self) -> Tensor:
        """The advantages at every token: [B, T]."""
        return self.advantages[:, None].expand(self.mask.shape)

    @property
    def rewards_at_end(self) -> Tensor:
        """The rewards at the last action token of each row, 0 elsewhere: [B, T]."""
        places = torch.arange(self.mask.shape[1]) * self.mask
        at_end = torch.nn.functional.one_hot(places.argmax(dim=1), self.mask.shape[1])
        return at_end.to(self.rewards.dtype) * self.rewards[:, None]

    @property
    def denominators(self) -> Denominators:
        """Counts of the batch as a whole."""
        return count_denominators(self.mask, max_tokens=MAX_TOKENS)


def batches(
    count: int = BATCHES,
    *,
    offset: int = 0,
    gaps: bool = True,
    padding_rows: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Iterator[PeerBatch]:
    """`count` batches. gaps: tool text between action tokens. offset: other seeds."""
    for number in range(count):
        yield make_batch(
            SEED + offset + number,
            large=number % LARGE_EVERY == LARGE_EVERY - 1,
            gaps=gaps,
            padding_rows=padding_rows,
            dtype=dtype,
        )


def make_batch(
    seed: int, *, large: bool, gaps: bool, padding_rows: bool, dtype: torch.dtype
) -> PeerBatch:
    """The batch of one seed."""
    random = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    groups, members = (4, 8) if large else (integer(1, 4), integer(2, 5))
    rows, columns = groups * members, 256 if large else integer(1, 20)
    spread = SPREADS[seed % len(SPREADS)]
    mask, turns = _mask_and_turns(rows, columns, random, gaps=gaps, padding_rows=padding_rows)
    target = -normal(rows, columns).abs() - 0.05
    proximal = (target + spread * normal(rows, columns)).clamp(max=-1e-3)
    return PeerBatch(
        seed=seed,
        target=target,
        proximal=proximal,
        behaviour=(proximal + spread * normal(rows, columns)).clamp(max=-1e-3),
        reference=(target + spread * normal(rows, columns)).clamp(max=-1e-3),
        values=normal(rows, columns),
        token_rewards=normal(rows, columns) * mask,
        rewards=_rewards(groups, members, integer(0, 3), random).to(dtype),
        advantages=normal(rows),
        group_index=torch.arange(groups).repeat(members),  # siblings do not lie side by side
        mask=mask,
        turns=turns,
        lag=torch.randint(0, 12, (rows, columns), generator=random),
    )


def _mask_and_turns(
    rows: int, columns: int, random: torch.Generator, *, gaps: bool, padding_rows: bool
) -> tuple[Tensor, Tensor]:
    """Action mask and turn ids [B, T]: spans of action tokens, with tool text between them."""
    lengths = torch.randint(1, columns + 1, (rows, 1), generator=random)
    mask = torch.arange(columns) < lengths
    borders = torch.rand(rows, columns, generator=random) < 0.25
    borders[:, 0] = False
    spans = borders.cumsum(dim=1)
    if gaps:
        mask &= spans % 2 == 0
        spans = spans // 2
    if padding_rows:
        mask[1:] &= torch.rand(rows - 1, 1, generator=random) > 0.15
    return mask, spans


def _rewards(groups: int, members: int, kind: int, random: torch.Generator) -> Tensor:
    """Rewards [groups x members], by member: real, binary, few values, or equal in a group."""
    shape = (members, groups)
    if kind == 0:
        return torch.randn(shape, generator=random, dtype=torch.float64).flatten()
    if kind == 1:
        return torch.randint(0, 2, shape, generator=random).double().flatten()
    if kind == 2:
        return torch.randint(0, 4, shape, generator=random).double().flatten() / 3
    equal = torch.randint(0, 4, (1, groups), generator=random).double() / 10
    return equal.expand(shape).flatten()
