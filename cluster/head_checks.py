"""Whether the queue and the codec can hold what heads add to a group (`actors.trajectory.head`).

Asked only of a correction that needs heads. That these are of the whole vocabulary needs no rule
here: a configuration cannot cut the support (`config_sections.FULL_SUPPORT`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.derived import group_bytes, queue_groups

if TYPE_CHECKING:
    from cluster.config import RunConfig


def heads_fit(config: RunConfig, head_tokens: int) -> str | None:
    """The problem with heads of `head_tokens`, or None."""
    if head_tokens == 0:
        return None
    return _fits_the_codec(config, head_tokens) or _fits_the_queue(config, head_tokens)


def _fits_the_codec(config: RunConfig, head_tokens: int) -> str | None:
    from actors.trajectory.frame import MAX_GROUP_BYTES

    largest = group_bytes(config, head_tokens)
    if largest <= MAX_GROUP_BYTES:
        return None
    return (
        f"correction.recipe = {config.correction.recipe!r}: asks for heads of {head_tokens} "
        f"tokens, with which a group may have about {largest} bytes; at most {MAX_GROUP_BYTES} "
        "are accepted. Lower rollout.group_size, rollout.max_turn_tokens or the override "
        "surrogate.head"
    )


def _fits_the_queue(config: RunConfig, head_tokens: int) -> str | None:
    groups = queue_groups(config)
    needed = groups * group_bytes(config, head_tokens)
    if config.queue.max_bytes >= needed:
        return None
    return (
        f"queue.max_bytes = {config.queue.max_bytes}: the lag bound admits {groups} groups, with "
        f"the heads of {head_tokens} tokens that correction.recipe = "
        f"{config.correction.recipe!r} asks for about {needed} bytes"
    )
