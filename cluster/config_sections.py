"""The tables of a run configuration, one class a table. Defaults are those of the demo.

Frozen, strict (no text for numbers), nothing unknown, nothing non-finite. The text under each
field is its documentation and says its unit. What depends on two fields is in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

AtLeastZero: TypeAlias = Annotated[int, Field(ge=0)]
AtLeastOne: TypeAlias = Annotated[int, Field(ge=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Momentum: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]

FULL_SUPPORT = (
    "the behaviour logprobs must be those of the policy itself: only {} is accepted "
    "(design, section 4, rule 1: a cut support makes the importance ratios wrong)"
)


class Section(BaseModel):
    """What all tables have in common."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


class RunSection(Section):
    """[run]: identity, length and end of the run."""

    seed: AtLeastZero = 17
    """Seed of everything random."""
    root: Name = "runs"
    """Folder in which the run directory is made."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "demo"
    """End of the run id and directory, after the start: letters, digits, dot, dash, underscore."""
    max_steps: AtLeastOne = 100
    """Optimiser steps after which the run is done; a batch in work gets its last passes."""
    max_wall_s: Positive | None = None
    """Seconds after which the run ends in order; without it only max_steps ends it."""
    stall_timeout_s: Positive = 120.0
    """Seconds without progress, or without a learner rank's answer, after which the run stops."""


class ModelSection(Section):
    """[model]: the policy to start from."""

    path: Name = "starter"
    """"starter" makes and caches the demo's own policy; else a local folder or transformers id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trained weights and of the engines."""
    revision: Name | None = None
    """Revision of a transformers id; not for local folders."""


class EnvironmentSection(Section):
    """[environment]: where actions land."""

    name: Name = "calculator"
    """A registered environment."""
    options: dict[str, JsonValue] = {}
    """Handed to the environment as it is."""


class RolloutSection(Section):
    """[rollout]: one episode, and how many of them make a group."""

    group_size: AtLeastOne = 8
    """Trajectories of one task that are compared with one another."""
    max_turns: AtLeastOne = 4
    """Model calls in one episode."""
    max_turn_tokens: AtLeastOne = 24
    """Most tokens that one turn may sample."""
    temperature: Positive = 1.0
    """Of sampling; the learner divides its logits by the same number."""
    top_p: float = 1.0
    """Accepted only at 1: mu must have the full support."""
    top_k: int = -1
    """Accepted only at -1 (off): mu must have the full support."""
    episode_deadline_s: Positive = 60.0
    """Seconds after which a running episode is dropped, never rewarded."""
    environment_deadline_s: Positive = 10.0
    """Seconds that one call into the environment may take before the episode is dropped."""

    max_filtered_in_a_row: AtLeastZero = 500
    """Groups that the group filter may drop in a row before the run stops; 0 never stops it."""

    @field_validator("top_p")
    @classmethod
    def _whole_mass(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(FULL_SUPPORT.format("1.0"))
        return value

    @field_validator("top_k")
    @classmethod
    def _whole_vocabulary(cls, value: int) -> int:
        if value != -1:
            raise ValueError(FULL_SUPPORT.format("-1 (off)"))
        return value


class ActorsSection(Section):
    """[actors]: the processes that act. Each holds one engine."""

    count: AtLeastOne = 1
    """Rollout actors."""
    groups_in_flight: AtLeastOne = 16
    """Groups that one actor runs at once; more of them hide the time of tools."""
    num_cpus: NotNegative = 0.5
    """CPUs that Ray reserves for one actor."""
    num_gpus: NotNegative = 0.0
    """GPUs that Ray reserves for one actor; 0 runs its engine on the CPU."""
    max_restarts: AtLeastZero = 3
    """Restarts of one actor after which the run stops."""


class EngineSection(Section):
    """[engine]: the text generation backend of each actor."""

    max_context_tokens: AtLeastOne = 128
    """Most tokens of one episode, observed and sampled."""
    max_running_requests: AtLeastOne = 128
    """Requests that are sampled at once; more of them wait."""
    kv_cache_bytes: AtLeastZero = 128 * 2**20
    """Memory of the KV cache; 0, on a GPU only, lets gpu_memory_utilization decide."""
    gpu_memory_utilization: Share = 0.1
    """Share of the device's memory that the engine may take."""
    threads: AtLeastOne = 1
    """CPU threads of the engine; ignored on a GPU."""
    enforce_eager: bool = True
    """No graph capture; must be true on the CPU."""
    kv_mode: Literal["recompute", "keep"] = "recompute"
    """KV cache after a swap: recomputed, so that versions are true, or kept (a hybrid policy)."""
    canary_tolerance: Positive | None = None
    """Largest |engine - learner| logprob that proves a swap, in nats; by default by dtype."""
    swap_deadline_s: Positive = 30.0
    """Seconds that pause, load, proof and resume may take together."""
    tensor_parallel_size: AtLeastOne = 1
    """GPUs over which one engine is spread."""


class QueueSection(Section):
    """[queue]: where finished groups wait for the learner."""

    max_groups: AtLeastOne | None = None
    """Most groups that wait; by default as many as the lag bound can ever admit."""
    max_bytes: AtLeastOne = 256 * 2**20
    """Most bytes that wait."""
    lease_s: Positive = 300.0
    """Seconds after which a batch that was taken and not acknowledged is given out again."""


class LagSection(Section):
    """[lag]: the bound of the policy lag."""

    max_lag_versions: AtLeastZero = 4
    """Largest accepted policy lag, in optimiser steps; 0 trains strictly on-policy."""


class CorrectionSection(Section):
    """[correction]: how the update corrects for policy lag."""

    recipe: Name = "decoupled_ppo"
    """A named method; `lagwise check` prints what it is composed of."""
    none: bool = False
    """True accepts lag without any correction, knowingly."""
    overrides: dict[str, JsonValue] = {}
    """Parts and parameters of the recipe to replace, such as `surrogate.clip_high = 0.28`."""


class LearnerSection(Section):
    """[learner]: the processes that optimise."""

    ranks: AtLeastOne = 1
    """DeepSpeed ranks."""
    groups_per_step: AtLeastOne = 8
    """Groups in one batch."""
    max_reuse: AtLeastOne = 1
    """Optimiser passes over one batch. Every pass after the first adds a version of lag."""
    learning_rate: Positive = 5e-4
    """Peak learning rate of AdamW."""
    warmup_steps: AtLeastZero = 0
    """Applied optimiser steps until the learning rate has its peak."""
    weight_decay: NotNegative = 0.0
    """Of AdamW, on matrices only."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """Decay of AdamW's two running means."""
    gradient_clip: NotNegative = 1.0
    """Largest global gradient norm; 0 does not clip."""
    micro_batch_tokens: AtLeastOne = 2048
    """Most tokens, padding included, in one forward pass."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """ZeRO stage: what the ranks share out (optimiser, gradients, weights)."""
    threads: AtLeastOne = 1
    """CPU threads of one rank."""
    num_cpus: NotNegative = 1.0
    """CPUs that Ray reserves for one rank."""
    num_gpus: NotNegative = 0.0
    """GPUs that Ray reserves for one rank; 0 trains on the CPU."""
    max_non_finite_steps: AtLeastOne = 3
    """Steps in a row that may be refused for a non-finite loss or gradient."""


class CriticSection(Section):
    """[critic]: the estimate of values, where the correction's advantage needs one."""

    kind: Literal["head", "model"] = "head"
    """A linear layer on the policy's last hidden state, or a transformer of its own."""
    path: Name | None = None
    """Folder or transformers id that a "model" starts from; without it the policy's own."""
    learning_rate: Positive = 1e-3
    """Peak learning rate of the critic; warm-up is the policy's."""
    detach_trunk: bool = False
    """Whether a "head" sends no gradient into the policy."""


class ReferenceSection(Section):
    """[reference]: the frozen policy of KL penalties, where the correction has one."""

    path: Name | None = None
    """Folder or transformers id; without it the policy that the run starts from."""


class PretrainingSection(Section):
    """[pretraining]: text that is mixed in, where the correction's penalties ask for it."""

    path: Name | None = None
    """A local .jsonl, .txt or .parquet file."""
    field: Name = "text"
    """Key or column of the text; a .txt file has none."""
    tokens_per_step: AtLeastOne = 4096
    """Tokens of all ranks in one optimiser step, a multiple of block_tokens."""
    block_tokens: Annotated[int, Field(ge=2)] = 512
    """Length of the pieces that the text is cut into."""


class BroadcastSection(Section):
    """[broadcast]: when and how new weights travel."""

    schedule: Literal["every", "adaptive"] = "every"
    """Every k versions, or k from the measured cost against the lag that it saves."""
    every_versions: AtLeastOne = 1
    """k, in optimiser steps; the start value of "adaptive"."""
    engine_deadline_s: Positive = 30.0
    """Seconds after which a slow engine is left behind, to skip to the latest version."""
    bucket_bytes: Annotated[int, Field(ge=2**16)] = 64 * 2**20
    """Size of one packed bucket of weights."""


class MetricsSection(Section):
    """[metrics]: the Prometheus endpoint."""

    enabled: bool = True
    """Whether there is one."""
    host: Name = "127.0.0.1"
    """Address that it listens on; it has no authentication."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port; 0 takes a free one and says which."""


class EvaluationSection(Section):
    """[evaluation]: success on held-out tasks."""

    tasks: AtLeastOne = 200
    """Held-out tasks, one episode each."""
    temperature: Positive = 1.0
    """Of sampling."""
    at_start: bool = True
    """Evaluate the first version."""
    at_end: bool = True
    """Evaluate the last version."""
