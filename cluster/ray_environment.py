"""Environment variables that Ray reads when it is first imported.

Ray's own default for authentication differs between ways of starting it, so the mode is always
said. A private cluster gets a token of its own, handed on through the environment and never
written to disk.
"""

from __future__ import annotations

import os
import secrets


def set_ray_environment() -> None:
    """Call before Ray is imported. What the user has set already stays as it is."""
    if os.environ.get("RAY_ADDRESS"):
        return  # the cluster that is joined decides
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
