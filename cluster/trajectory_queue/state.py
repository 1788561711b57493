"""The trajectory queue as a plain state machine: who may start, what waits, who trains on what.

A group goes  granted (in flight) -> ready -> leased -> trained,  or is dropped for a named reason
on the way. This class is not concurrent: one owner calls it (the Ray actor in
`ray_queue.py`, the simulator, a test), the clock is injected.

Invariants
    a group id is accepted once; a repeated or late put changes nothing and is counted
    the ledger closes after every call
    no leased batch can exceed the lag bound on any of its passes (actors.admission)
    ready groups are bounded in count by what was granted and in bytes by `max_bytes`, except
    that whatever a batch still lacks is let in, so that a full queue can never starve its learner
    an actor that was reported lost gets nothing more, however late its requests arrive
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from actors.admission import capacity, may_lease, trainable
from actors.task_queue import Grant, PutOutcome
from actors.trajectory.record import DropReason
from cluster.observing.events import QueueStats
from cluster.trajectory_queue.filtering import FilterAccount
from cluster.trajectory_queue.ledger import Ledger, check_closed
from cluster.trajectory_queue.records import (
    GroupSummary,
    InFlight,
    Lease,
    Leased,
    QueuePolicy,
    Ready,
    sizes,
)
from cluster.trajectory_queue.requesters import Requesters
from correction.errors import RunError
from correction.versions import PolicyVersion


class QueueState:
    """See the module docstring. Times are seconds of the injected monotonic clock."""

    def __init__(self, policy: QueuePolicy, clock: Callable[[], float]) -> None:
        self.policy = policy
        self._clock = clock
        self._ledger = Ledger()
        self._groups = FilterAccount(policy.max_filtered_in_a_row)
        self._in_flight: dict[str, InFlight] = {}
        self._ready: dict[str, Ready] = {}
        self._leases: dict[int, Leased] = {}
        self._requesters = Requesters()
        self._next_index = 0
        self._next_lease = 0
        self._version = PolicyVersion(0, 0)
        self._paused: str | None = "start"
        self._refused: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._duplicates = 0

    # --- producers -------------------------------------------------------------------------

    def grant(self, actor: str, engine_step: int, want: int, request_id: str = "") -> list[Grant]:
        """Admit up to `want` groups on an engine at `engine_step`; may be none.

        actor: one incarnation of a rollout actor. request_id: with the same one the actor's last
        request is answered as before, see `Requesters`.
        """
        return self._requesters.answer(
            actor, request_id, lambda: self._admit(actor, engine_step, want)
        )

    def _admit(self, actor: str, engine_step: int, want: int) -> list[Grant]:
        room, rule = self._room(engine_step)
        count = min(want, room)
        if want > 0 and count == 0:
            self._refused[rule] += 1
        grants = []
        for _ in range(count):
            group_id = f"{self.policy.run_id}/{self._next_index}"
            grants.append(Grant(group_id, self._next_index, self.policy.group_size))
            self._in_flight[group_id] = InFlight(actor, self.policy.group_size, engine_step)
            self._ledger.issue(self.policy.group_size)
            self._next_index += 1
        return grants

    def put(self, summary: GroupSummary, payload: bytes) -> PutOutcome:
        """Take in a finished group. Raises nothing for bad luck: the outcome says what happened."""
        granted = self._in_flight.get(summary.group_id)
        if granted is None:
            self._duplicates += 1
            return PutOutcome.DUPLICATE
        if not summary.filtered and self._too_full_for(len(payload)):
            return PutOutcome.FULL
        del self._in_flight[summary.group_id]
        self._ledger.receive(summary, granted.members, len(payload))
        reason = self._unfit(summary)
        self._compare(summary, reason)
        if reason is not None:
            self._ledger.drop(reason, summary.survivors, summary.tokens)
            return PutOutcome.DROPPED
        self._ready[summary.group_id] = Ready(summary, payload, self._clock())
        return PutOutcome.ACCEPTED

    def reject(self, group_id: str, codec_reason: str) -> None:
        """The payload of a granted group was refused by the codec."""
        self._rejected[codec_reason] += 1
        self.lost([group_id], DropReason.INVALID)

    def lost(self, group_ids: Iterable[str], reason: DropReason) -> None:
        """Granted groups will never be put."""
        for group_id in group_ids:
            granted = self._in_flight.pop(group_id, None)
            if granted is not None:
                self._ledger.drop(reason, granted.members, 0)

    def actor_lost(self, actor: str) -> int:
        """An actor died: everything it had in flight is dropped by name. Returns how many.

        For good: a request of its that is still under way is granted nothing.
        """
        self._requesters.lose(actor)
        gone = [gid for gid, granted in self._in_flight.items() if granted.actor == actor]
        self.lost(gone, DropReason.ACTOR_LOST)
        return len(gone)

    # --- consumer --------------------------------------------------------------------------

    def lease(self) -> Lease | None:
        """The next batch, oldest version first; None while there is none that may be trained."""
        self.expire_leases()
        self._drop_too_old()
        size = self.policy.budget.groups_per_step
        if self._leases or len(self._ready) < size:
            return None
        order = self._oldest_first()
        batch, rest = order[:size], order[size:]
        if not may_lease(self.policy.budget, self._version.step, self._outstanding(rest)):
            return None
        return self._hand_out(batch)

    def take(self, count: int) -> tuple[bytes, ...]:
        """Up to `count` groups for good, oldest first, counted as trained once; maybe none.

        For consumers that are no paced learner (`get` of Ray's queue surface): each group is in
        bound now, but how many are taken together is the consumer's own affair.
        """
        self._drop_too_old()
        lease = self._hand_out(self._oldest_first()[:count])
        self.ack(lease.lease_id, self._version, passes=1)
        return lease.payloads

    def _hand_out(self, batch: list[Ready]) -> Lease:
        for ready in batch:
            del self._ready[ready.summary.group_id]
        self._next_lease += 1
        self._leases[self._next_lease] = Leased(batch, self._clock() + self.policy.lease_s)
        return Lease(
            self._next_lease,
            tuple(ready.payload for ready in batch),
            tuple(ready.summary.group_id for ready in batch),
        )

    def ack(self, lease_id: int, version: PolicyVersion, passes: int) -> bool:
        """The batch served `passes` applied passes; the learner is at `version` now.

        Returns False for a lease that is not held any more: then nothing was counted.
        """
        leased = self._leases.pop(lease_id, None)
        if leased is None:
            return False
        self.learner_at(version)
        for ready in leased.groups:
            survivors, tokens = ready.summary.survivors, ready.summary.tokens
            if passes > 0:
                self._ledger.train(survivors, tokens)
            else:
                self._ledger.drop(DropReason.NON_FINITE, survivors, tokens)
        return True

    def nack(self, lease_id: int) -> None:
        """Give a batch back unused."""
        leased = self._leases.pop(lease_id, None)
        for ready in leased.groups if leased else ():
            self._ready[ready.summary.group_id] = ready

    def expire_leases(self) -> None:
        """Take back what a consumer held beyond its deadline."""
        now = self._clock()
        for lease_id in [i for i, leased in self._leases.items() if leased.deadline_s < now]:
            self.nack(lease_id)

    def learner_at(self, version: PolicyVersion) -> None:
        """The learner's version; it never moves backward."""
        if version < self._version:
            raise RunError(f"learner version moved backward: {self._version} -> {version}")
        self._version = version

    # --- control ---------------------------------------------------------------------------

    def pause(self, why: str) -> None:
        """Admit nothing until `resume`."""
        self._paused = why

    def resume(self) -> None:
        """Admit again."""
        self._paused = None

    def finish(self) -> None:
        """End of the run: whatever is still open is dropped by name."""
        self._paused = "finished"
        for lease_id in list(self._leases):
            self.nack(lease_id)
        self.lost(list(self._in_flight), DropReason.SHUTDOWN)
        for ready in self._ready.values():
            self._ledger.drop(DropReason.SHUTDOWN, ready.summary.survivors, ready.summary.tokens)
        self._ready.clear()

    @property
    def version(self) -> PolicyVersion:
        """The learner's version as last told."""
        return self._version

    def lag_blocked(self, engine_step: int) -> bool:
        """Whether an engine at `engine_step` may start nothing only because it is behind."""
        return self._room(engine_step)[0] == 0 and self._room(self._version.step)[0] > 0

    def stats(self) -> QueueStats:
        """Read everything; raises RunError if the ledger does not close."""
        queued, queued_tokens = sizes(self._ready.values())
        leased, leased_tokens = sizes(r for lease in self._leases.values() for r in lease.groups)
        in_flight = sum(granted.members for granted in self._in_flight.values())
        trajectories = self._ledger.trajectories(queued=queued, leased=leased, in_flight=in_flight)
        tokens = self._ledger.tokens(queued=queued_tokens, leased=leased_tokens)
        check_closed(trajectories, "trajectories")
        check_closed(tokens, "tokens")
        oldest = min((r.arrived_s for r in self._ready.values()), default=self._clock())
        return QueueStats(
            trajectories=trajectories,
            tokens=tokens,
            ready_groups=len(self._ready),
            in_flight_groups=len(self._in_flight),
            leased_groups=self._leased_groups(),
            queued_bytes=self._ready_bytes(),
            received_bytes=self._ledger.received_bytes,
            head_bytes=self._ledger.head_bytes,
            kept=self._groups.kept,
            filtered=self._groups.filtered,
            stop_cause=self._groups.stop_cause,
            oldest_age_s=self._clock() - oldest,
            capacity_groups=self._room(self._version.step)[0],
            refused=dict(self._refused),
            duplicates=self._duplicates,
            rejected=dict(self._rejected),
        )

    # --- rules -----------------------------------------------------------------------------

    def _next_batch_step(self) -> int:
        """Learner step at which the next batch will be taken."""
        return self._version.step + (self.policy.budget.steps_per_batch if self._leases else 0)

    def _outstanding(self, ready: Sequence[Ready] | None = None) -> Counter[int]:
        waiting = self._ready.values() if ready is None else ready
        counts = Counter(r.summary.oldest_step for r in waiting)
        counts.update(granted.oldest_step for granted in self._in_flight.values())
        return counts

    def _room(self, engine_step: int) -> tuple[int, str]:
        """Groups that may start on such an engine, and the rule that is tightest."""
        if self._paused is not None or self._groups.stop_cause is not None:
            return 0, "paused"
        open_groups = len(self._ready) + len(self._in_flight)
        rooms = {
            "lag": capacity(
                self.policy.budget, self._next_batch_step(), self._outstanding(), engine_step
            ),
            "count": self.policy.max_groups - open_groups,
            "bytes": self._room_in_bytes(open_groups),
        }
        if self.policy.total_steps is not None:
            rooms["tail"] = self._groups_to_the_end(self.policy.total_steps) - open_groups
        rule = min(rooms, key=lambda name: rooms[name])
        return max(0, rooms[rule]), rule

    def _room_in_bytes(self, open_groups: int) -> int:
        """Never less than a batch lacks: what was filtered or lost must be made up for."""
        if self._expected_bytes() < self.policy.max_bytes:
            return self.policy.max_groups
        return self.policy.budget.groups_per_step - open_groups

    def _groups_to_the_end(self, total_steps: int) -> int:
        """Groups that the batches after the one in work need. From the version, not from what
        was acked: a step that was refused must be made by another batch."""
        budget = self.policy.budget
        steps_left = max(0, total_steps - self._next_batch_step())
        return -(-steps_left // budget.steps_per_batch) * budget.groups_per_step

    def _leased_groups(self) -> int:
        return sum(len(leased.groups) for leased in self._leases.values())

    def _ready_bytes(self) -> int:
        return sum(len(ready.payload) for ready in self._ready.values())

    def _expected_bytes(self) -> float:
        """Bytes that will wait once all that is in flight arrives, by the mean size seen."""
        if not self._ready:
            return 0.0
        return self._ready_bytes() * (1 + len(self._in_flight) / len(self._ready))

    def _too_full_for(self, size_bytes: int) -> bool:
        """Never while the learner waits for a straggler: it may be the very one that is put."""
        if self._ready_bytes() + size_bytes <= self.policy.max_bytes:
            return False
        size = self.policy.budget.groups_per_step
        rest = self._oldest_first()[size:]
        return len(self._ready) >= size and may_lease(
            self.policy.budget, self._next_batch_step(), self._outstanding(rest)
        )

    def _oldest_first(self) -> list[Ready]:
        return sorted(self._ready.values(), key=lambda r: (r.summary.oldest_step, r.arrived_s))

    def _unfit(self, summary: GroupSummary) -> DropReason | None:
        if summary.filtered:
            return DropReason.FILTERED
        if summary.survivors < self.policy.min_survivors:
            return DropReason.GROUP_TOO_SMALL
        if not trainable(self.policy.budget, self._next_batch_step(), summary.oldest_step):
            return DropReason.LAG
        return None

    def _compare(self, summary: GroupSummary, reason: DropReason | None) -> None:
        """Count what the group filter judged, whatever becomes of it afterwards."""
        if summary.account is None or reason is DropReason.GROUP_TOO_SMALL:
            return
        (self._groups.drop if summary.filtered else self._groups.keep)(summary.account)

    def _drop_too_old(self) -> None:
        step = self._next_batch_step()
        for group_id, ready in list(self._ready.items()):
            if not trainable(self.policy.budget, step, ready.summary.oldest_step):
                del self._ready[group_id]
                self._ledger.drop(DropReason.LAG, ready.summary.survivors, ready.summary.tokens)
