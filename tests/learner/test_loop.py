"""The learner's loop with plain fakes: order, limits, refused steps, stalls, publishing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from correction.errors import RunError
from correction.versions import PolicyVersion
from learner.loop import LearnerLoop, LoopLimits
from learner.schedule import BroadcastSchedule
from learner.step import StepReport


@dataclass
class OneBatch:
    lease_id: int
    payloads: Sequence[bytes] = (b"x",)


def report(version: PolicyVersion, applied: bool = True, reuse: int = 1) -> StepReport:
    return StepReport(
        version=version.next_step() if applied else version,
        applied=applied,
        reuse=reuse,
        loss=0.0,
        gradient_norm=1.0 if applied else float("inf"),
        learning_rate=1e-3,
        metrics={},
        lag_tokens={0: 1},
        lag_trajectories={0: 1},
        trajectories=1,
        action_tokens=1,
        padding_waste=0.0,
        phases_s={},
        reward_mean=0.5,
        reward_parts={},
    )


@dataclass
class Rig:
    """Source, ranks and broadcast in one, writing down what happens in `log`."""

    batches: int = 100
    passes: int = 1
    applied: bool = True
    blocked: bool = False
    busy: bool = False
    leases_hold: bool = True
    health: Exception | None = None
    stop: str | None = None
    log: list[str] = field(default_factory=list)
    version: PolicyVersion = PolicyVersion(0, 0)  # noqa: RUF009
    waits: int = 0

    def lease(self, timeout_s: float) -> OneBatch | None:
        if self.batches == 0:
            self.waits += 1
            return None
        self.batches -= 1
        return OneBatch(self.batches)

    def ack(self, lease_id: int, version: PolicyVersion, passes: int) -> bool:
        self.log.append(f"ack {version} {passes}")
        return self.leases_hold

    def lag_blocked(self, engine_step: int) -> bool:
        return self.blocked

    def train(self, payloads: Sequence[bytes], version: PolicyVersion) -> list[StepReport]:
        reports = []
        for reuse in range(1, self.passes + 1):
            reports.append(report(version, self.applied, reuse))
            version = reports[-1].version
        self.version = version
        self.log.append(f"train {version}")
        return reports

    def gather(self) -> str:
        return str(self.version)

    @property
    def in_progress(self) -> bool:
        return self.busy

    def offer(self, published: str) -> None:
        self.log.append(f"offer {published}")

    def mean_stall_s(self) -> float:
        return 0.0

    def loop(
        self, *, max_steps: int = 3, every: int = 1, stall_s: float = 60.0
    ) -> LearnerLoop[str]:
        def check_health() -> None:
            if self.health is not None:
                raise self.health

        return LearnerLoop(
            source=self,
            ranks=self,
            broadcast=self,
            schedule=BroadcastSchedule("every", every, most_versions=10),
            limits=LoopLimits(max_steps, None, stall_s, max_non_finite_steps=2),
            on_step=lambda report, passes, step_s, wait_s: self.log.append(
                f"step {report.version}"
            ),
            check_health=check_health,
            explain_stall=lambda: "; dropped so far: 3 invalid",
            stop_requested=lambda: self.stop,
        )


def test_each_batch_is_trained_acked_told_and_published_in_this_order() -> None:
    rig = Rig()
    assert rig.loop(max_steps=2).run() == "max_steps"
    assert rig.log == [
        "train 0.1", "ack 0.1 1", "step 0.1", "offer 0.1",
        "train 0.2", "ack 0.2 1", "step 0.2", "offer 0.2",
    ]  # fmt: skip


def test_passes_are_acked_together_and_counted() -> None:
    rig = Rig(passes=3)
    rig.loop(max_steps=3).run()
    assert rig.log[:2] == ["train 0.3", "ack 0.3 3"]
    assert rig.log.count("step 0.2") == 1


def test_every_second_version_is_published() -> None:
    rig = Rig()
    loop = rig.loop(max_steps=4, every=2)
    loop.publish()
    loop.run()
    assert [line for line in rig.log if line.startswith("offer")] == [
        "offer 0.0", "offer 0.2", "offer 0.4",
    ]  # fmt: skip


def test_starved_engines_are_served_early() -> None:
    rig = Rig(blocked=True)
    loop = rig.loop(max_steps=1, every=5)
    loop.publish()
    loop.run()
    assert rig.log[-1] == "offer 0.1"


def test_nothing_is_published_while_all_engines_are_busy() -> None:
    rig = Rig(busy=True)
    rig.loop(max_steps=3).run()
    assert not [line for line in rig.log if line.startswith("offer")]


def test_the_last_version_is_published_once() -> None:
    rig = Rig()
    loop = rig.loop(max_steps=1)
    loop.run()
    loop.publish_if_new()
    assert rig.log.count("offer 0.1") == 1


def test_refused_steps_move_no_version_and_end_the_run_after_some_in_a_row() -> None:
    rig = Rig(applied=False)
    with pytest.raises(RunError, match="3 optimiser steps in a row were refused"):
        rig.loop().run()
    assert rig.log.count("ack 0.0 0") == 3


def test_the_first_cause_of_a_broken_fleet_is_raised() -> None:
    rig = Rig(batches=0, health=RunError("actor-0 failed"))
    with pytest.raises(RunError, match="actor-0 failed"):
        rig.loop().run()


def test_a_stall_ends_in_an_error_that_names_the_key() -> None:
    rig = Rig(batches=1)
    with pytest.raises(RunError, match=r"run\.stall_timeout_s"):
        rig.loop(stall_s=0.0).run()


def test_a_stall_tells_what_is_known_of_its_cause() -> None:
    with pytest.raises(RunError, match=r"dropped so far: 3 invalid"):
        Rig(batches=0).loop(stall_s=0.0).run()


def test_a_lease_that_ran_out_while_training_is_no_silent_success() -> None:
    rig = Rig(leases_hold=False)
    with pytest.raises(RunError, match=r"queue\.lease_s"):
        rig.loop().run()


def test_a_request_ends_the_run_with_its_reason_also_while_waiting() -> None:
    rig = Rig(batches=0, stop="SIGTERM")
    assert rig.loop().run() == "SIGTERM"
    assert rig.log == []
