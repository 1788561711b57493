"""Before anything imports Ray: the environment variables that it reads at import."""

from __future__ import annotations

from cluster.ray_environment import set_ray_environment

set_ray_environment()
