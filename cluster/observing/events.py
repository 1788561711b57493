"""What happens in a run, as frozen records, and the Observer protocol that receives them.

The supervisor and the learner loop tell; observers keep. Metrics exporter, step log, summary and
live view are observers and know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from actors.trajectory.account import GroupCosts
from correction.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """One side of the ledger, in trajectories or in tokens. It closes at every instant:

    issued = trained + sum(dropped) + queued + leased + in_flight. In tokens `issued` means
    generated and reported; what is in flight is not known yet and counts 0 on both sides.
    """

    issued: int
    trained: int
    dropped: Mapping[str, int]
    queued: int
    leased: int
    in_flight: int

    @property
    def open(self) -> int:
        """What has no terminal state yet."""
        return self.queued + self.leased + self.in_flight


@dataclass(frozen=True, slots=True)
class QueueStats:
    """State of the trajectory queue at one instant."""

    trajectories: LedgerCounts
    tokens: LedgerCounts
    ready_groups: int
    in_flight_groups: int
    leased_groups: int
    queued_bytes: int
    oldest_age_s: float
    """Age of the oldest group that waits; 0 where none does."""
    capacity_groups: int
    """Groups that could be admitted now for an engine at the newest published version."""
    refused: Mapping[str, int]
    """Admissions refused so far, by the rule that refused: "lag", "count", "bytes", "tail",
    "paused"."""
    duplicates: int
    rejected: Mapping[str, int]
    """Payloads refused by the codec, by its reason."""
    received_bytes: int = 0
    """Bytes of all groups taken in so far."""
    head_bytes: int = 0
    """Bytes of heads among them."""
    kept: Mapping[str, GroupCosts] = field(default_factory=dict)
    """Costs of the finished groups that the group filter kept, by `GroupOutcome`."""
    filtered: Mapping[str, GroupCosts] = field(default_factory=dict)
    """Costs of those that it dropped."""
    stop_cause: str | None = None
    """Why no batch can be expected any more, in words; None while there is hope."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One applied (or refused) optimiser step."""

    version: PolicyVersion
    """Version after the step."""
    applied: bool
    reuse_pass: int
    """Which pass over its batch this was, from 1."""
    passes: int
    """Passes that this batch gets in all."""
    at_s: float
    """Seconds since the run began."""
    step_s: float
    """Seconds of the step itself."""
    wait_s: float
    """Seconds that the learner waited for data before it."""
    reward_mean: float
    reward_parts: Mapping[str, float]
    loss: float
    gradient_norm: float
    learning_rate: float
    action_tokens: int
    trajectories: int
    lag_trajectories: Mapping[int, int]
    """Histogram: policy lag of the trajectories trained on in this step -> how many."""
    lag_tokens: Mapping[int, int]
    """Histogram: policy lag of the action tokens trained on in this step -> how many."""
    metrics: Mapping[str, float]
    """Figures of the step, pooled over the batch; docs/run_directory.md names them all."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    padding_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class BroadcastEvent:
    """One engine's part in one broadcast. outcome: "swapped", "skipped", "deadline", "failed".

    phases_s: any of gather, put, fetch, pause, load, verify, resume. gather, put happen once a
    broadcast, fetch once a node; they are reported with the first engine that used them.
    """

    engine: str
    version: PolicyVersion
    outcome: str
    phases_s: Mapping[str, float]
    stall_s: float = 0.0
    mismatch: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ActorStats:
    """One rollout actor at one instant. state: "starting", "running", "swapping", "dead"."""

    actor: str
    state: str
    version: PolicyVersion | None
    running_groups: int
    running_requests: int
    generated_tokens: int
    """Tokens sampled since the actor started."""
    idle_s: float
    """Seconds with no group running since it started."""
    alive_s: float
    tool_calls: int
    environment_s: float
    restarts: int
    full_puts: int
    """Puts that found the queue full and were repeated."""
    identical_groups: int
    """Finished groups whose members all sampled the same tokens."""


@dataclass(frozen=True, slots=True)
class EvaluationEvent:
    """Held-out evaluation at one version. tasks: episodes that ended. success: their mean reward;
    interval: 95 %, Wilson."""

    version: PolicyVersion
    tasks: int
    success: float
    low: float
    high: float
    temperature: float
    seconds: float
    failed: int = 0
    """Further tasks whose episode failed for a reason that is not the policy's; not in `tasks`."""


class Observer(Protocol):
    """Receives what happens. Called from one thread; must be quick and must not raise."""

    def on_step(self, event: StepEvent) -> None:
        """An optimiser step was made."""
        ...

    def on_broadcast(self, event: BroadcastEvent) -> None:
        """An engine took, skipped or failed a broadcast."""
        ...

    def on_queue(self, stats: QueueStats) -> None:
        """Queue and ledger were read (about once a second)."""
        ...

    def on_actors(self, stats: Mapping[str, ActorStats]) -> None:
        """All rollout actors were read (about once a second); absent ones are gone."""
        ...

    def on_evaluation(self, event: EvaluationEvent) -> None:
        """A held-out evaluation ended."""
        ...

    def on_message(self, level: str, text: str) -> None:
        """Something worth a log line. level: "info", "warning", "error"."""
        ...
