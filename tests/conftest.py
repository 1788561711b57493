"""What all tests share: Ray's environment before Ray is imported, and hypothesis' profile."""

from __future__ import annotations

from hypothesis import settings

from cluster.ray_environment import set_ray_environment

set_ray_environment()

# Shared machines stall for seconds at times: no example has a deadline of its own (pytest-timeout
# bounds each test). A failing example prints the blob that reproduces it.
settings.register_profile("lagwise", deadline=None, print_blob=True)
settings.load_profile("lagwise")
