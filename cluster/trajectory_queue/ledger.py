"""The ledger: every issued trajectory ends in exactly one terminal state, and it closes always.

issued = trained + dropped + queued + leased + in flight, in trajectories and in tokens. The
terminal counts are kept here as they happen; the open ones are counted from the queue's own
containers by the caller, so that the check compares two independent accounts.
"""

from __future__ import annotations

from collections import Counter

from actors.trajectory.record import DropReason
from cluster.observing.events import LedgerCounts
from cluster.trajectory_queue.records import GroupSummary
from correction.errors import RunError


class Ledger:
    """Running account of trajectories, of the tokens that they sampled and of the bytes received.

    received_bytes: of encoded groups. head_bytes: of the heads in them.
    """

    def __init__(self) -> None:
        self._issued = 0
        self._generated_tokens = 0
        self._trained = 0
        self._trained_tokens = 0
        self._dropped: Counter[str] = Counter()
        self._dropped_tokens: Counter[str] = Counter()
        self.received_bytes = 0
        self.head_bytes = 0

    def issue(self, trajectories: int) -> None:
        """Rollouts were admitted."""
        self._issued += trajectories

    def receive(self, summary: GroupSummary, members: int, size_bytes: int) -> None:
        """A granted group of so many members came in, encoded in `size_bytes`.

        Its tokens are known now. Members that failed are dropped by their reason; a member without
        a word is an engine's failure.
        """
        self.received_bytes += size_bytes
        self.head_bytes += summary.head_bytes
        self._generated_tokens += summary.tokens
        for reason, count in summary.failures.items():
            tokens = summary.failed_tokens.get(reason, 0)
            self._generated_tokens += tokens
            self.drop(reason, count, tokens)
        silent = members - summary.survivors - sum(summary.failures.values())
        if silent:
            self.drop(DropReason.ENGINE_ERROR, silent, 0)

    def train(self, trajectories: int, tokens: int) -> None:
        """Trajectories served their last pass."""
        self._trained += trajectories
        self._trained_tokens += tokens

    def drop(self, reason: DropReason, trajectories: int, tokens: int) -> None:
        """Trajectories were dropped; their tokens are those of a received group."""
        self._dropped[reason.value] += trajectories
        self._dropped_tokens[reason.value] += tokens

    def trajectories(self, *, queued: int, leased: int, in_flight: int) -> LedgerCounts:
        """The account in trajectories, beside the counts of the queue's containers."""
        return LedgerCounts(
            self._issued, self._trained, dict(self._dropped), queued, leased, in_flight
        )

    def tokens(self, *, queued: int, leased: int) -> LedgerCounts:
        """The account in tokens."""
        return LedgerCounts(
            self._generated_tokens,
            self._trained_tokens,
            dict(self._dropped_tokens),
            queued,
            leased,
            0,
        )


def check_closed(counts: LedgerCounts, unit: str) -> None:
    """Raise RunError unless the account closes."""
    accounted = counts.trained + sum(counts.dropped.values()) + counts.open
    if accounted != counts.issued:
        raise RunError(f"the ledger does not close in {unit}: issued {counts.issued}, {counts}")
