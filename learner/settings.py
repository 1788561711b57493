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
CRITICS = ("none", "head", "model")
PRETRAINING_SUFFIXES = (".jsonl", ".txt", ".parquet")


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
class CriticSettings:
    """What estimates the value of a state, for GAE and V-trace.

    kind: "head", one linear layer on the policy's last hidden state; "model", a transformer of its
    own with such a head; "none". path: folder or transformers id that a "model" starts from; None
    for the policy's own. learning_rate: its peak; warm-up and decay are the policy's.
    detach_trunk: a "head" trains itself only and sends no gradient into the policy.

    The gradient norm that is clipped is that of policy and critic together.
    """

    kind: str = "none"
    path: str | None = None
    learning_rate: float = 1e-5
    detach_trunk: bool = False

    def __post_init__(self) -> None:
        if self.kind not in CRITICS:
            raise ConfigError(f"critic.kind: one of {CRITICS}, got {self.kind!r}")
        if self.path is not None and self.kind != "model":
            raise ConfigError(f"critic.path: only for kind 'model', the kind is {self.kind!r}")
        if self.detach_trunk and self.kind != "head":
            raise ConfigError(
                f"critic.detach_trunk: only for kind 'head', the kind is {self.kind!r}"
            )
        if not self.learning_rate > 0.0:
            raise ConfigError(f"critic.learning_rate: must be > 0, got {self.learning_rate}")


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    """The frozen reference policy. path: folder or transformers id; None for the start policy.

    A run that goes on from a saved policy must name the policy that it once began with.
    """

    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainingSettings:
    """Text that is trained on beside the trajectories, so that the policy keeps what it knew.

    path: a local .jsonl, .txt or .parquet file. field: key or column of the text (not for .txt).
    tokens_per_step: of all ranks in one optimiser step, a multiple of block_tokens.
    block_tokens: length of the pieces that the text is cut into.
    """

    path: str
    field: str = "text"
    tokens_per_step: int = 4096
    block_tokens: int = 512

    def __post_init__(self) -> None:
        if not self.path.endswith(PRETRAINING_SUFFIXES):
            raise ConfigError(
                f"pretraining.path: must end in one of {PRETRAINING_SUFFIXES}, got {self.path!r}"
            )
        if self.block_tokens < 2:
            raise ConfigError(f"pretraining.block_tokens: must be >= 2, got {self.block_tokens}")
        if self.tokens_per_step < 1 or self.tokens_per_step % self.block_tokens:
            raise ConfigError(
                "pretraining.tokens_per_step: must be a positive multiple of block_tokens "
                f"({self.block_tokens}), got {self.tokens_per_step}"
            )

    @property
    def blocks_per_step(self) -> int:
        """Blocks of all ranks in one optimiser step."""
        return self.tokens_per_step // self.block_tokens

    def check_shared(self, ranks: int) -> None:
        """Raise ConfigError unless the ranks can share the blocks of a step evenly."""
        if self.blocks_per_step % ranks:
            raise ConfigError(
                f"pretraining.tokens_per_step = {self.tokens_per_step}: makes "
                f"{self.blocks_per_step} blocks of {self.block_tokens} tokens, which {ranks} "
                "learner ranks cannot share evenly"
            )


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
    reference, pretraining: None where the recipe needs none: nothing is loaded then.
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
    critic: CriticSettings = CriticSettings()
    reference: ReferenceSettings | None = None
    pretraining: PretrainingSettings | None = None

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
