"""One Ray actor a node: fetches published buckets once and lays them into shared memory.

Contract
    consumes    a manifest and object references of its buckets
    produces    one segment on this node, read by every engine of the node
    waits for   the object store
    invariants  one store owns the segments of a run on a node; they vanish with it
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.weight_segment import SegmentStore, default_segment_directory
from actors.weights import WeightManifest
from cluster.broadcast import Published


class NodeStore:
    """The Ray actor's class."""

    def __init__(self, run_id: str) -> None:
        self._store = SegmentStore(default_segment_directory(run_id), run_id)

    def stage(self, manifest: WeightManifest, references: Sequence[Any]) -> str:
        """Fetch (zero-copy from this node's object store) and write; returns the segment."""
        return self._store.write(manifest, ray.get(list(references)))

    def close(self) -> None:
        """Remove all segments."""
        self._store.remove_all()


class NodeStores:
    """The stores of all nodes that have engines, started when first needed."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._stores: dict[str, Any] = {}

    async def stage(self, node: str, published: Published) -> str:
        """See `cluster.broadcast.Staging`."""
        if node not in self._stores:
            remote = ray.remote(num_cpus=0, max_restarts=0)(NodeStore)
            affinity = NodeAffinitySchedulingStrategy(node, soft=False)
            self._stores[node] = remote.options(scheduling_strategy=affinity).remote(self._run_id)
        reference = self._stores[node].stage.remote(published.manifest, list(published.buckets))
        try:
            segment: str = await reference
        except ray.exceptions.RayActorError:
            del self._stores[node]  # the next broadcast starts another one
            raise
        return segment

    async def close(self, grace_s: float = 5.0) -> None:
        """Remove the segments of every node that can still be reached."""
        for store in self._stores.values():
            try:
                await asyncio.wait_for(store.close.remote(), grace_s)
            except (TimeoutError, ray.exceptions.RayError):
                continue  # the node is gone, and its memory with it
            finally:
                ray.kill(store)
        self._stores.clear()
