"""What a learner is told before it starts: the model, the optimiser, the batch, its place.

Plain frozen records without heavy imports, so that a driver can build and ship them before torch
or DeepSpeed is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.weights import DTYPES
from correction.errors import ConfigError

if TYPE_CHECKING:
    from correction.recipes import Recipe

TRAINING_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimiserSettings:
    """AdamW with linear warm-up and then a constant or linearly decaying learning rate.

    learning_rate: its peak. warmup_steps: applied optimiser steps until the peak. decay_steps:
    applied steps at which the rate has fallen to 0; None for a constant rate.
    weight_decay: on matrices only, never on norms and biases. gradient_clip: largest global
    gradient norm; 0 switches clipping off.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    decay_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    gradient_clip: float = 1.0

    def __post_init__(self) -> None:
        if not self.learning_rate > 0.0:
            raise ConfigError(f"learning_rate: must be > 0, got {self.learning_rate}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps: must be >= 0, got {self.warmup_steps}")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ConfigError(f"decay_steps: must be more than warmup_steps ({self.warmup_steps})")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas: each must be in [0, 1), got {self.betas}")
        if self.weight_decay < 0.0 or self.gradient_clip < 0.0 or not self.epsilon > 0.0:
            raise ConfigError("weight_decay, gradient_clip: must be >= 0; epsilon: must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Everything that is the same on every rank.

    model_path: folder or transformers id. dtype: of the weights that are trained; with bfloat16
    the optimiser keeps fp32 masters. engine_dtype: what the engines load. zero_stage: 0 to 3.
    max_trajectory_tokens: the generation limit of one trajectory (denominator of `constant`).
    max_reuse: optimiser passes over one batch. micro_batch_tokens: most tokens, padding included,
    in one forward pass. threads: CPU threads a rank may use. timeout_s: a collective that waits
    longer fails. bucket_bytes: size of one packed weight bucket. canary_tolerance: largest
    |engine - learner| logprob that proves a swap; None takes the one of engine_dtype.
    """

    run_id: str
    model_path: str
    recipe: Recipe
    max_trajectory_tokens: int
    optimiser: OptimiserSettings = OptimiserSettings()
    dtype: str = "float32"
    engine_dtype: str = "float32"
    zero_stage: int = 1
    max_reuse: int = 1
    micro_batch_tokens: int = 2048
    gradient_checkpointing: bool = False
    seed: int = 0
    threads: int = 1
    timeout_s: float = 120.0
    bucket_bytes: int = 64 * 2**20
    canary_tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in TRAINING_DTYPES:
            raise ConfigError(f"dtype: one of {TRAINING_DTYPES}, got {self.dtype!r}")
        if self.engine_dtype not in DTYPES:
            raise ConfigError(f"engine_dtype: one of {DTYPES}, got {self.engine_dtype!r}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_stage: 0, 1, 2 or 3, got {self.zero_stage}")
        if self.zero_stage == 0 and self.dtype != "float32":
            raise ConfigError("zero_stage: bfloat16 needs stage 1, 2 or 3, which keep fp32 masters")
        for name in (
            "max_trajectory_tokens",
            "max_reuse",
            "micro_batch_tokens",
            "threads",
            "bucket_bytes",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be >= 1, got {getattr(self, name)}")
        if not self.timeout_s > 0.0:
            raise ConfigError(f"timeout_s: must be > 0, got {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank stands in its group. The port is free on rank 0's node, one per group."""

    rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 29500

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank: must be in [0, {self.world_size}), got {self.rank}")
