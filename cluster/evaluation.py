"""Held-out success with its interval, through the same engines that act."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.observing.events import EvaluationEvent
from correction.versions import PolicyVersion


def wilson_interval(mean: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a success rate over `count` tasks (Wilson 1927).

    Rewards between 0 and 1 that are not binary have less variance than a coin of the same mean,
    so that the interval is then on the safe side.
    """
    if count == 0:
        return 0.0, 1.0
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    half /= 1 + z * z / count
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluation_event(
    outcomes: Sequence[float | None], version: PolicyVersion, temperature: float, seconds: float
) -> EvaluationEvent:
    """The event that tells of one evaluation.

    outcomes: rewards, None for an episode that failed: that is never a reward. At least one ended.
    """
    rewards = [reward for reward in outcomes if reward is not None]
    mean = sum(rewards) / len(rewards)
    low, high = wilson_interval(min(1.0, max(0.0, mean)), len(rewards))
    return EvaluationEvent(
        version, len(rewards), mean, low, high, temperature, seconds, len(outcomes) - len(rewards)
    )
