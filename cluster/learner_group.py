"""The learner's ranks as Ray actors, called together.

Contract
    consumes    batches of encoded groups
    produces    step reports, published weights, a policy folder
    waits for   all ranks, never longer than the call's deadline
    invariants  every call goes to all ranks or the group is broken; buckets of a published
                version are put into the object store by rank 0, where they were gathered
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.broadcast import Published
from correction.errors import RunError
from correction.versions import PolicyVersion
from learner.rank import LearnerRank
from learner.settings import LearnerSettings, RankPlace
from learner.step import StepReport


class LearnerShell:
    """The Ray actor's class: one rank."""

    def __init__(self) -> None:
        self._rank: LearnerRank | None = None

    def address(self) -> tuple[str, int]:
        """Address of this node and a port that is free on it now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def start(self, settings: LearnerSettings, place: RankPlace) -> None:
        """Load the model and join the group."""
        self._rank = LearnerRank(settings, place)

    def train(self, payloads: Sequence[bytes], version: PolicyVersion) -> list[StepReport]:
        """See `LearnerRank.train`."""
        return self._started().train(payloads, version)

    def gather(self) -> Published | None:
        """Gather the weights; rank 0 puts them into the object store."""
        gathered = self._started().gather()
        if gathered is None:
            return None
        began = time.monotonic()
        references = tuple(ray.put(bucket) for bucket in gathered.buckets)
        gather_s = sum(gathered.phases_s.values())
        phases_s = {"gather": gather_s, "put": time.monotonic() - began}
        return Published(gathered.manifest, references, phases_s)

    def save_policy(self, folder: Path) -> None:
        """See `LearnerRank.save_policy`."""
        self._started().save_policy(str(folder))

    def close(self) -> None:
        """Leave the process group."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None

    def _started(self) -> LearnerRank:
        if self._rank is None:
            raise RunError("this learner rank was not started")
        return self._rank


class LearnerGroup:
    """All ranks, as the learner loop sees them."""

    def __init__(
        self,
        settings: LearnerSettings,
        *,
        ranks: int,
        num_cpus: float,
        num_gpus: float,
        start_deadline_s: float,
        answer_deadline_s: float,
    ) -> None:
        """Place the ranks together. Raises RunError when the bundle does not fit in time.

        start_deadline_s: of placing and starting. answer_deadline_s: of every call after that.
        """
        self._settings = settings
        self._deadline_s = start_deadline_s
        self._answer_deadline_s = answer_deadline_s
        bundle = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
        self._placement = placement_group([bundle] * ranks, strategy="PACK")
        if not self._placement.wait(start_deadline_s):
            raise RunError(
                f"no place for the learner: {ranks} bundles of {bundle} within "
                f"{start_deadline_s:.0f} s; the cluster has {ray.available_resources()} free"
            )
        strategy = PlacementGroupSchedulingStrategy(self._placement)
        remote = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0)(LearnerShell)
        self._ranks = [remote.options(scheduling_strategy=strategy).remote() for _ in range(ranks)]

    def start(self) -> None:
        """Load the model on every rank and join them. Blocks."""
        address, port = self._get([self._ranks[0].address.remote()])[0]
        places = [
            RankPlace(rank, len(self._ranks), address, port) for rank in range(len(self._ranks))
        ]
        self._get(
            [
                shell.start.remote(self._settings, place)
                for shell, place in zip(self._ranks, places, strict=True)
            ]
        )
        self._deadline_s = self._answer_deadline_s

    def train(self, payloads: Sequence[bytes], version: PolicyVersion) -> list[StepReport]:
        """Train one batch; reports of rank 0."""
        batch = ray.put(list(payloads)) if len(self._ranks) > 1 else list(payloads)
        reports: list[StepReport] = self._get(
            [shell.train.remote(batch, version) for shell in self._ranks]
        )[0]
        return reports

    def gather(self) -> Published:
        """Publish the present weights."""
        published: Published = self._get([shell.gather.remote() for shell in self._ranks])[0]
        return published

    def save_policy(self, folder: Path) -> None:
        """Write the policy as a folder that transformers and vLLM load."""
        self._get([shell.save_policy.remote(folder) for shell in self._ranks])

    def close(self, grace_s: float = 10.0) -> None:
        """Release the ranks and their place."""
        with suppress(ray.exceptions.RayError):  # a rank that is gone has nothing to release
            ray.get([shell.close.remote() for shell in self._ranks], timeout=grace_s)
        for shell in self._ranks:
            ray.kill(shell)
        remove_placement_group(self._placement)

    def _get(self, references: list[Any]) -> list[Any]:
        """Results of all ranks; the first rank that fails ends the wait for the others."""
        waiting = list(references)
        deadline = time.monotonic() + self._deadline_s
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not done:
                raise RunError(f"a learner rank did not answer within {self._deadline_s:.0f} s")
            try:
                ray.get(done)
            except RayActorError as error:
                raise RunError("a learner rank is lost: its process died") from error
        return list(ray.get(references))
