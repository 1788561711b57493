"""Two implementations of one function over many batches: what they differ by, and why.

A comparison either demands equality, or names the reason for which the peer departs. A departure
is a test as well: what the peer returns must be exactly what our value and the reason make of it,
and the difference must show on some batch (a peer that has changed its mind is noticed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.numerics.peers.peer_batches import PeerBatch

LossOf = Callable[[PeerBatch, Tensor], Tensor]
"""A loss of a batch and of target logprobs [B, T]."""
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
"""Largest difference that is called rounding, relative to numbers above 1."""
EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. difference: the largest of all batches, relative above 1."""

    function: str
    peer: str
    batches: int
    difference: float
    verdict: str


TABLE: list[Row] = []
"""Rows of this session, printed at its end by conftest."""


@dataclass(slots=True)
class Comparison:
    """What has been seen so far. `departs`: why the peer's value is another one; empty: it is not.

    Call `batch()` once a batch, then `same` or `departs_as` for each tensor of it.
    """

    function: str
    peer: str
    departs: str = ""
    batches: int = 0
    difference: float = 0.0
    _seed: int | None = field(default=None)

    def batch(self, seed: int) -> None:
        """The next batch, and the seed that makes it again."""
        self._seed = seed
        self.batches += 1

    def same(self, ours: Tensor, theirs: Tensor) -> None:
        """Both are one value."""
        self._judge(ours, theirs, ours)

    def departs_as(self, ours: Tensor, theirs: Tensor, explained: Tensor) -> None:
        """The peer's value is `explained`, which ours becomes under the peer's convention."""
        self._judge(explained, theirs, ours)

    def _judge(self, expected: Tensor, theirs: Tensor, ours: Tensor) -> None:
        ours, theirs, expected = (value.detach() for value in (ours, theirs, expected))
        assert expected.shape == theirs.shape, f"{expected.shape} beside {theirs.shape}"
        if theirs.numel() == 0:
            return
        dtype = torch.promote_types(expected.dtype, theirs.dtype)
        narrow = min((expected.dtype, theirs.dtype), key=lambda kind: torch.finfo(kind).bits)
        expected, theirs, ours = expected.to(dtype), theirs.to(dtype), ours.to(dtype)
        scale = theirs.abs().clamp(min=1.0)
        wrong = ~((expected - theirs).abs() <= TOLERANCE[narrow] * scale)  # also where one is NaN
        assert not bool(wrong.any()), (
            f"{self.function} beside {self.peer}, batch of seed {self._seed}: "
            f"{expected[wrong][:4].tolist()} expected, {theirs[wrong][:4].tolist()} found"
        )
        self.difference = max(self.difference, float(((ours - theirs).abs() / scale).max()))


@contextmanager
def compared(function: str, peer: str, departs: str = "") -> Iterator[Comparison]:
    """A comparison whose row goes into the table where nothing in the block failed."""
    comparison = Comparison(function, peer, departs)
    yield comparison
    assert comparison.batches > 0
    if departs:
        assert comparison.difference > 0.0, f"{peer} no longer departs: {departs}"
    verdict = f"departs on purpose: {departs}" if departs else EQUAL
    TABLE.append(Row(function, peer, comparison.batches, comparison.difference, verdict))


def same_losses(
    function: str, peer: str, ours: LossOf, theirs: LossOf, stream: Iterable[PeerBatch]
) -> None:
    """Value and gradient in the target logprobs are equal on every batch."""
    with compared(function, peer) as seen:
        for batch in stream:
            seen.batch(batch.seed)
            for mine, other in zip(_graded(ours, batch), _graded(theirs, batch), strict=True):
                seen.same(mine, other)


def departing_losses(
    function: str,
    peer: str,
    why: str,
    ours: LossOf,
    theirs: LossOf,
    explained: LossOf,
    stream: Iterable[PeerBatch],
) -> None:
    """Value and gradient are those of `explained`, and not everywhere ours."""
    with compared(function, peer, why) as seen:
        for batch in stream:
            seen.batch(batch.seed)
            triples = (_graded(loss, batch) for loss in (ours, theirs, explained))
            for mine, other, reason in zip(*triples, strict=True):
                seen.departs_as(mine, other, reason)


def _graded(loss: LossOf, batch: PeerBatch) -> tuple[Tensor, Tensor]:
    target = batch.target.clone().requires_grad_()
    value = loss(batch, target)
    (gradient,) = torch.autograd.grad(value, target)
    return value, gradient


def table_lines(rows: list[Row]) -> list[str]:
    """The table as text."""
    widths = [max(len(row.function) for row in rows), max(len(row.peer) for row in rows)]
    head = f"{'function':<{widths[0]}}  {'peer':<{widths[1]}}  batches  difference  verdict"
    return [head] + [
        f"{row.function:<{widths[0]}}  {row.peer:<{widths[1]}}  {row.batches:>7}  "
        f"{row.difference:>10.1e}  {row.verdict}"
        for row in sorted(rows, key=lambda row: (row.function, row.peer, row.verdict))
    ]
