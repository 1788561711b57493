"""The records that travel: turn, trajectory, group. Read this file first.

    Turn              one model call: what was observed before it, what was sampled, by which policy
    Trajectory        one episode: its turns, its reward, why it ended
    TrajectoryGroup   the siblings of one task, put and trained together

All are frozen. Arrays are one-dimensional NumPy arrays, made read-only. Only sampled tokens have
a behaviour logprob and a behaviour version; observed tokens (prompt, tool, environment) have
neither, by construction. Wire format: `schema.py`, `codec.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from correction.errors import TrajectoryError
from correction.versions import PolicyVersion, VersionSpan

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


class EndReason(StrEnum):
    """Why an episode ended. All of these were caused by the policy and carry a reward."""

    DONE = "done"
    """The environment said that the episode is over (terminated)."""
    MAX_TURNS = "max_turns"
    """The turn limit was reached (truncated)."""
    MAX_TOKENS = "max_tokens"
    """A turn filled its token budget without a stop (truncated)."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next turn would not fit the model's context (truncated)."""

    @property
    def truncated(self) -> bool:
        """True where the episode was cut, not finished."""
        return self is not EndReason.DONE


class DropReason(StrEnum):
    """Why data was dropped. Bounded: these are metric labels. None of them is ever a reward."""

    LAG = "lag"
    FOREIGN_LINEAGE = "foreign_lineage"
    DUPLICATE = "duplicate"
    INVALID = "invalid"
    NON_FINITE = "non_finite"
    OVERFLOW = "overflow"
    GROUP_TOO_SMALL = "group_too_small"
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENGINE_ERROR = "engine_error"
    ROLLOUT_DEADLINE = "rollout_deadline"
    ACTOR_LOST = "actor_lost"
    SHUTDOWN = "shutdown"


class KvMode(StrEnum):
    """What a swap did to the KV cache of running requests."""

    RECOMPUTE = "recompute"
    """KV was recomputed with the new weights: a token's version is the truth."""
    KEEP = "keep"
    """Old KV was kept: tokens after a swap come from a hybrid policy."""


@dataclass(frozen=True, slots=True)
class VersionRun:
    """`length_tokens` consecutive sampled tokens of one version."""

    version: PolicyVersion
    length_tokens: int


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are sampled. The support is never cut: top_p = 1, top_k off, no penalties.

    temperature: > 0. max_turn_tokens: most tokens one turn may sample. stop_token_ids: tokens
    that end a turn; they are sampled, so they belong to the action. seed: None for free sampling.
    """

    temperature: float = 1.0
    max_turn_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One model call.

    observation_ids: int32 [n], tokens put into the context since the last call (n >= 0; the
        prompt for the first turn, tool text later). Never trained on.
    action_ids: int32 [m], m >= 1, the sampled tokens, including a sampled stop token.
    behaviour_logprobs: float32 [m], log mu of each sampled token at the sampling temperature,
        as the engine returned it.
    version_runs: run-length encoded behaviour versions; lengths sum to m.
    finish: "stop" (a stop token) or "length" (token budget).
    tool_calls: calls that the environment executed for this action.
    generation_s, environment_s: seconds in the engine and in the environment.
    engine_incarnation: identifies the engine process that sampled the turn.
    """

    observation_ids: Int32
    action_ids: Int32
    behaviour_logprobs: Float32
    version_runs: tuple[VersionRun, ...]
    finish: str
    tool_calls: int = 0
    generation_s: float = 0.0
    environment_s: float = 0.0
    engine_incarnation: str = ""

    def __post_init__(self) -> None:
        for name, dtype in (
            ("observation_ids", np.int32),
            ("action_ids", np.int32),
            ("behaviour_logprobs", np.float32),
        ):
            array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            if array.ndim != 1:
                raise TrajectoryError("bad_shape", f"{name} must be one-dimensional")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        tokens = len(self.action_ids)
        if tokens == 0:
            raise TrajectoryError("empty_action", "a turn must have sampled at least one token")
        if len(self.behaviour_logprobs) != tokens:
            raise TrajectoryError(
                "length_mismatch",
                f"{tokens} sampled tokens but {len(self.behaviour_logprobs)} behaviour logprobs",
            )
        if sum(run.length_tokens for run in self.version_runs) != tokens:
            raise TrajectoryError(
                "missing_version", f"version runs do not cover the {tokens} sampled tokens"
            )


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """One trajectory as aligned arrays of length T, in context order.

    token_ids int32, action_mask bool (true on sampled tokens), behaviour_logprobs float32
    (0 where not sampled), behaviour_steps int64 (-1 where not sampled), turn_ids int32 (-1 where
    not sampled).
    """

    token_ids: Int32
    action_mask: Bool
    behaviour_logprobs: Float32
    behaviour_steps: Int64
    turn_ids: Int32


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished episode.

    trajectory_id: unique in the run. group_id, member: its group and its place in it.
    reward: finite; reward_parts: named parts, for inspection.
    """

    trajectory_id: str
    group_id: str
    member: int
    turns: tuple[Turn, ...]
    reward: float
    reward_parts: Mapping[str, float]
    end_reason: EndReason
    sampling: SamplingParameters
    kv_mode: KvMode = KvMode.RECOMPUTE
    started_at_s: float = 0.0
    """Unix time at which the rollout began."""
    duration_s: float = 0.0
    """Wall time of the whole episode."""

    @property
    def terminated(self) -> bool:
        """True where the environment ended the episode, so that no value follows it."""
        return not self.end_reason.truncated

    @property
    def truncated(self) -> bool:
        """True where the episode was cut."""
        return self.end_reason.truncated

    @cached_property
    def version_span(self) -> VersionSpan:
        """Oldest and newest version that sampled a token."""
        return VersionSpan.of(run.version for turn in self.turns for run in turn.version_runs)

    @cached_property
    def action_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.action_ids) for turn in self.turns)

    @cached_property
    def context_tokens(self) -> int:
        """Number of all tokens, sampled and observed."""
        return sum(len(turn.observation_ids) for turn in self.turns) + self.action_tokens

    @property
    def tool_calls(self) -> int:
        """Tool calls of all turns."""
        return sum(turn.tool_calls for turn in self.turns)

    @property
    def environment_s(self) -> float:
        """Seconds spent in the environment and its tools."""
        return sum(turn.environment_s for turn in self.turns)

    @property
    def generation_s(self) -> float:
        """Seconds spent in the engine."""
        return sum(turn.generation_s for turn in self.turns)

    def flat(self) -> FlatTokens:
        """All turns as aligned arrays."""
        length = self.context_tokens
        token_ids = np.empty(length, np.int32)
        action_mask = np.zeros(length, np.bool_)
        logprobs = np.zeros(length, np.float32)
        steps = np.full(length, -1, np.int64)
        turn_ids = np.full(length, -1, np.int32)
        at = 0
        for number, turn in enumerate(self.turns):
            token_ids[at : at + len(turn.observation_ids)] = turn.observation_ids
            at += len(turn.observation_ids)
            end = at + len(turn.action_ids)
            token_ids[at:end] = turn.action_ids
            action_mask[at:end] = True
            logprobs[at:end] = turn.behaviour_logprobs
            turn_ids[at:end] = number
            for run in turn.version_runs:
                steps[at : at + run.length_tokens] = run.version.step
                at += run.length_tokens
        return FlatTokens(token_ids, action_mask, logprobs, steps, turn_ids)


@dataclass(frozen=True, eq=False)
class TrajectoryGroup:
    """The surviving siblings of one task.

    run_id: the run that issued it; data of another run is refused.
    expected_size: how many rollouts were issued; `trajectories` holds the survivors.
    failures: how many members were dropped for each reason, and `failed_tokens` what they had
        sampled by then.
    """

    run_id: str
    group_id: str
    environment: str
    task_id: str
    expected_size: int
    trajectories: tuple[Trajectory, ...]
    failures: Mapping[DropReason, int] = field(default_factory=dict)
    failed_tokens: Mapping[DropReason, int] = field(default_factory=dict)

    @cached_property
    def version_span(self) -> VersionSpan:
        """Oldest and newest version over all members: a group's lag is its oldest member's."""
        spans = [trajectory.version_span for trajectory in self.trajectories]
        return VersionSpan(min(s.oldest for s in spans), max(s.newest for s in spans))

    @cached_property
    def action_tokens(self) -> int:
        """Sampled tokens of all survivors."""
        return sum(trajectory.action_tokens for trajectory in self.trajectories)
