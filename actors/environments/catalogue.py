"""Every environment that ships with lagwise; importing this module registers them."""

from __future__ import annotations

from actors.environments import calculator, reasoning_gym

__all__ = ["calculator", "reasoning_gym"]
