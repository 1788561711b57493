"""Joining a Ray cluster, or starting a private one on this machine.

A private cluster asks every caller for its token (`ray_environment`); a cluster that is there
already (`RAY_ADDRESS`, set by `ray job submit`) is joined as it is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray

OBJECT_STORE_BYTES = 512 * 2**20
"""Object store of a private cluster: some versions of the weights and some batches."""


@contextmanager
def ray_session(num_cpus: float) -> Iterator[Mapping[str, float]]:
    """A connection for the time of a run; yields the cluster's resources.

    num_cpus: CPUs that a private cluster offers at least. On a machine with fewer cores they
    are shares of its cores: everything still runs, only slower.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "lagwise"}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address="auto", **common)
    else:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(num_cpus + 0.999)),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **common,
        )
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()
