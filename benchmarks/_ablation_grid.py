"""The grid of the lag ablation: which runs, and what makes the lag of each real.

A bound alone makes no lag: the demo's actor and learner are about equally fast, so that with
`max_lag_versions = 16` the lag stays near 2. For a wanted mean lag of L two things are asked of
the pipeline, the same for all methods:

    broadcast every L versions             the engines are (L - 1) / 2 versions behind on average
    5 L groups in flight, 8 a step         a token waits about L / 2 versions more to be trained on
    max_lag_versions = L + L / 2           where the actor is the faster side, the queue stops here

Both regimes, actor slower or faster than the learner, come to a mean near L; what it really was is
in every row. L = 0 is strictly on-policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from correction.errors import ConfigError

CONFIG = "deploy/runs/demo.toml"
GROUP_SIZE = 8
LEAST_GROUPS_IN_FLIGHT = 10

METHODS: Mapping[str, Mapping[str, object]] = {
    "none": {"correction.recipe": "none", "correction.none": True},
    "ppo_bypass": {"correction.recipe": "ppo_bypass"},
    "decoupled_ppo": {"correction.recipe": "decoupled_ppo"},
    "tis": {"correction.recipe": "tis"},
    "gspo": {"correction.recipe": "gspo"},
    "vtrace": {"correction.recipe": "vtrace"},
}
"""Settings of each method, by the name of its recipe."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run. lag: wanted mean policy lag in versions. steps: optimiser steps."""

    seed: int
    lag: int
    method: str
    steps: int
    learning_rate: float

    def settings(self) -> dict[str, object]:
        """What the run sets beside the demo's configuration."""
        return {
            "run.seed": self.seed,
            "run.max_steps": self.steps,
            "learner.learning_rate": self.learning_rate,
            **lag_settings(self.lag),
            **METHODS[self.method],
        }


def lag_settings(lag: int) -> dict[str, object]:
    """Settings that bring the mean policy lag near `lag` versions; see the module docstring."""
    if lag == 0:
        return {"lag.max_lag_versions": 0}
    in_flight = max(LEAST_GROUPS_IN_FLIGHT, 5 * lag)
    return {
        "lag.max_lag_versions": lag + (lag + 1) // 2,
        "broadcast.every_versions": lag,
        "actors.groups_in_flight": in_flight,
        "engine.max_running_requests": GROUP_SIZE * in_flight,
    }


@dataclass(frozen=True, slots=True)
class Grid:
    """All runs asked for. Raises ConfigError for values that make none."""

    seeds: Sequence[int]
    lags: Sequence[int]
    methods: Sequence[str]
    steps: int
    learning_rate: float

    def __post_init__(self) -> None:
        for name in ("seeds", "lags", "methods"):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise ConfigError(f"{name}: must be a list of at least one, not {values!r}")
            if len(set(values)) < len(values):
                raise ConfigError(f"{name}: named twice in {list(values)}")
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise ConfigError(f"methods: unknown {unknown}; there are {', '.join(METHODS)}")
        for name, least in (("seeds", 0), ("lags", 0)):
            if not all(type(value) is int and value >= least for value in getattr(self, name)):
                raise ConfigError(f"{name}: must be whole numbers of at least {least}")
        if type(self.steps) is not int or self.steps < 10:
            raise ConfigError(f"steps: must be at least 10, tenths are compared, not {self.steps}")
        if not (isinstance(self.learning_rate, int | float) and self.learning_rate > 0):
            raise ConfigError(f"learning_rate: must be above 0, not {self.learning_rate}")

    def cells(self) -> Iterator[Cell]:
        """Seed by seed, so that what an interruption leaves is whole seeds."""
        for seed in self.seeds:
            for lag in self.lags:
                for method in self.methods:
                    yield Cell(seed, lag, method, self.steps, float(self.learning_rate))
