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
SIZES = ((1, 5), (2, 6), (1, 21))
"""Ranges of groups, members of each and columns of the usual batch."""
LARGE, LARGE_EVERY = (4, 8, 256), 250
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
        seed = SEED + offset + number
        large = number % LARGE_EVERY == LARGE_EVERY - 1
        size = LARGE if large else _size_of(seed)
        yield make_batch(seed, size, gaps=gaps, padding_rows=padding_rows, dtype=dtype)


def _size_of(seed: int) -> tuple[int, int, int]:
    random = torch.Generator().manual_seed(seed)
    groups, members, columns = (
        int(torch.randint(low, high, (), generator=random)) for low, high in SIZES
    )
    return groups, members, columns


def make_batch(
    seed: int,
    size: tuple[int, int, int],
    *,
    gaps: bool,
    padding_rows: bool,
    dtype: torch.dtype,
    span_tokens: int = 4,
) -> PeerBatch:
    """The batch of one seed. size: groups, members of each, columns. span_tokens: mean length of
    what the policy or a tool says at once."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    groups, members, columns = size
    rows, spread = groups * members, SPREADS[seed % len(SPREADS)]
    mask, turns = _mask_and_turns(rows, columns, span_tokens, random, gaps=gaps)
    if padding_rows:
        mask[1:] &= torch.rand(rows - 1, 1, generator=random) > 0.15
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
        rewards=_rewards(groups, members, seed % 4, random).to(dtype),
        advantages=normal(rows),
        group_index=torch.arange(groups).repeat(members),  # siblings do not lie side by side
        mask=mask,
        turns=turns,
        lag=torch.randint(0, 12, (rows, columns), generator=random),
    )


def _mask_and_turns(
    rows: int, columns: int, span_tokens: int, random: torch.Generator, *, gaps: bool
) -> tuple[Tensor, Tensor]:
    """Action mask and turn ids [B, T]: spans of action tokens, with tool text between them."""
    lengths = torch.randint(1, columns + 1, (rows, 1), generator=random)
    mask = torch.arange(columns) < lengths
    borders = torch.rand(rows, columns, generator=random) < 1 / span_tokens
    borders[:, 0] = False
    spans = borders.cumsum(dim=1)
    if gaps:
        mask &= spans % 2 == 0
        spans = spans // 2
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
