"""The queue over a real Ray actor: its own calls and the surface of ray.util.queue.Queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import ray
from ray.util.queue import Empty, Full, Queue

from actors.admission import LagBudget
from actors.task_queue import PutOutcome
from actors.trajectory.codec import encode_group
from actors.trajectory.head import padded_head
from actors.trajectory.record import (
    DropReason,
    EndReason,
    SamplingParameters,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionRun,
)
from cluster.ray_session import ray_session
from cluster.trajectory_queue.ray_queue import TrajectoryQueue
from cluster.trajectory_queue.records import QueuePolicy
from correction.errors import RunError, TrajectoryError
from correction.versions import PolicyVersion

pytestmark = pytest.mark.stack
V0 = PolicyVersion(0, 0)
POLICY = QueuePolicy(
    run_id="r",
    budget=LagBudget(max_lag_versions=2, groups_per_step=2),
    group_size=2,
    max_groups=6,
    max_bytes=10_000_000,
    lease_s=30.0,
)


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with ray_session(num_cpus=2):
        yield


@pytest.fixture
def queue() -> Iterator[TrajectoryQueue]:
    queue = TrajectoryQueue.start(POLICY)
    queue.resume()
    yield queue
    queue.shutdown(force=True)


def group(group_id: str, version: PolicyVersion = V0, run_id: str = "r") -> TrajectoryGroup:
    turn = Turn(
        observation_ids=np.array([1, 2], np.int32),
        action_ids=np.array([3, 4, 5], np.int32),
        behaviour_logprobs=np.array([-0.5, -0.25, -1.0], np.float32),
        version_runs=(VersionRun(version, 3),),
        finish="stop",
    )
    members = tuple(
        Trajectory(
            trajectory_id=f"{group_id}/{member}",
            group_id=group_id,
            member=member,
            turns=(turn,),
            reward=float(member),
            reward_parts={},
            end_reason=EndReason.DONE,
            sampling=SamplingParameters(),
        )
        for member in range(2)
    )
    return TrajectoryGroup(run_id, group_id, "calculator", "t", 2, members)


def grants(queue: TrajectoryQueue, want: int) -> list[str]:
    async def ask() -> list[str]:
        return [grant.group_id for grant in await queue.request_tasks("a", V0, want)]

    return asyncio.run(ask())


def put(queue: TrajectoryQueue, group_id: str, payload: bytes) -> PutOutcome:
    return asyncio.run(queue.put_group(group_id, payload))


def test_a_batch_travels_from_grant_to_ack(queue: TrajectoryQueue) -> None:
    ids = grants(queue, 2)
    for group_id in ids:
        assert put(queue, group_id, encode_group(group(group_id))) is PutOutcome.ACCEPTED
        assert put(queue, group_id, encode_group(group(group_id))) is PutOutcome.DUPLICATE
    lease = queue.lease(timeout_s=5)
    assert lease is not None
    assert list(lease.group_ids) == ids
    assert queue.ack(lease.lease_id, PolicyVersion(0, 1), 1)
    stats = queue.stats()
    assert (stats.trajectories.trained, stats.tokens.trained, stats.duplicates) == (4, 12, 2)


def with_heads(made: TrajectoryGroup, head_tokens: int) -> TrajectoryGroup:
    def headed(trajectory: Trajectory) -> Trajectory:
        (turn,) = trajectory.turns
        heads = padded_head(turn.action_ids[:, None], turn.behaviour_logprobs[:, None], head_tokens)
        turn = replace(turn, head_ids=heads[0], head_logprobs=heads[1])
        return replace(
            trajectory, turns=(turn,), sampling=SamplingParameters(head_tokens=head_tokens)
        )

    return replace(made, trajectories=tuple(map(headed, made.trajectories)))


def test_only_groups_with_the_heads_that_the_update_needs_are_taken_in() -> None:
    queue = TrajectoryQueue.start(replace(POLICY, head_tokens=4))
    queue.resume()
    try:
        without, other, right = grants(queue, 3)
        for wrong in (group(without), with_heads(group(other), 3)):
            with pytest.raises(TrajectoryError, match="wrong_head"):
                put(queue, wrong.group_id, encode_group(wrong))
        payload = encode_group(with_heads(group(right), 4))
        assert put(queue, right, payload) is PutOutcome.ACCEPTED
        stats = queue.stats()
        assert stats.rejected == {"wrong_head": 2}
        assert (stats.received_bytes, stats.head_bytes) == (len(payload), 2 * 3 * 4 * 8)
    finally:
        queue.shutdown(force=True)


def test_lease_returns_none_after_its_timeout_and_wakes_for_a_put(queue: TrajectoryQueue) -> None:
    assert queue.lease(timeout_s=0.1) is None
    ids = grants(queue, 2)
    waiting = queue.handle.lease.remote(20.0)
    for group_id in ids:
        put(queue, group_id, encode_group(group(group_id)))
    assert ray.get(waiting, timeout=10) is not None


def test_bad_bytes_are_refused_counted_and_harm_nothing(queue: TrajectoryQueue) -> None:
    one, two = grants(queue, 2)
    with pytest.raises(TrajectoryError):
        put(queue, one, b"no arrow")
    with pytest.raises(TrajectoryError, match="run"):
        put(queue, two, encode_group(group(two, run_id="other")))
    stats = queue.stats()
    assert stats.trajectories.dropped == {"invalid": 4}
    assert sum(stats.rejected.values()) == 2
    (third,) = grants(queue, 1)
    assert put(queue, third, encode_group(group(third))) is PutOutcome.ACCEPTED


def test_a_version_from_the_future_is_refused(queue: TrajectoryQueue) -> None:
    (one,) = grants(queue, 1)
    with pytest.raises(TrajectoryError, match="future"):
        put(queue, one, encode_group(group(one, PolicyVersion(0, 5))))


def test_a_group_of_another_size_is_refused(queue: TrajectoryQueue) -> None:
    (one,) = grants(queue, 1)
    larger = replace(group(one), expected_size=3, failures={DropReason.INVALID: 1})
    with pytest.raises(TrajectoryError, match="3 members"):
        put(queue, one, encode_group(larger))
    assert queue.stats().trajectories.dropped == {"invalid": 2}


def test_a_queue_that_died_is_named() -> None:
    queue = TrajectoryQueue.start(POLICY)
    queue.resume()
    ray.kill(queue.handle)
    with pytest.raises(RunError, match="trajectory queue is lost"):
        queue.stats()


def test_it_has_the_surface_of_rays_queue(queue: TrajectoryQueue) -> None:
    surface = {name for name in vars(Queue) if not name.startswith("_")}
    assert surface <= set(dir(queue))


def test_rays_surface_puts_and_gets(queue: TrajectoryQueue) -> None:
    assert queue.empty()
    assert not queue.full()
    with pytest.raises(Empty):
        queue.get_nowait()
    with pytest.raises(Empty):
        queue.get(timeout=0.1)
    payloads = [encode_group(group(group_id)) for group_id in grants(queue, 3)]
    queue.put(payloads[0])
    queue.put_nowait_batch(payloads[1:])
    assert queue.qsize() == queue.size() == 3
    assert queue.get() == payloads[0]
    with pytest.raises(Empty):
        queue.get_nowait_batch(3)
    assert queue.get_nowait_batch(2) == payloads[1:]
    assert queue.stats().trajectories.trained == 6


def test_async_surface(queue: TrajectoryQueue) -> None:
    (one,) = grants(queue, 1)
    payload = encode_group(group(one))

    async def through() -> bytes:
        await queue.put_async(payload)
        return await queue.get_async(timeout=5)

    assert asyncio.run(through()) == payload


def test_a_full_queue_says_full() -> None:
    queue = TrajectoryQueue.start(replace(POLICY, max_bytes=10))
    queue.resume()
    payloads = [encode_group(group(group_id)) for group_id in grants(queue, 4)]
    queue.put_nowait_batch(payloads[:2])  # a batch is always let in
    with pytest.raises(Full):
        queue.put_nowait(payloads[2])
    with pytest.raises(Full):
        queue.put(payloads[2], timeout=0.1)
    queue.shutdown()


def test_errors_of_the_state_machine_travel(queue: TrajectoryQueue) -> None:
    queue.learner_at(PolicyVersion(0, 3))
    with pytest.raises(Exception, match="backward"):
        queue.learner_at(PolicyVersion(0, 2))
