"""The records that travel: turn, trajectory, group. Read this file first.

    Turn              one model call: what was observed before it, what was sampled, by which policy
    Trajectory        one episode: its turns, its reward, why it ended
    TrajectoryGroup   the siblings of one task, put and trained together

All are frozen. Arrays are NumPy arrays, made read-only; all but heads are one-dimensional. Only
sampled tokens have a behaviour logprob, a behaviour version and, where asked for, a head
(`head.py`); observed tokens (prompt, tool, environment) have none of these, by construction. Wire
format: `schema.py`, `codec.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from actors.trajectory.account import GroupAccount
from actors.trajectory.head import BYTES_PER_HEAD_TOKEN, NO_TOKEN, read_only_heads
from correction.errors import TrajectoryError
from correction.versions import PolicyVersion, VersionSpan

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

_TURN_ARRAYS = (
    ("observation_ids", np.dtype(np.int32)),
    ("action_ids", np.dtype(np.int32)),
    ("behaviour_logprobs", np.dtype(np.float32)),
)


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
    FILTERED = "filtered"
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
    that end a turn; they are sampled, so they belong to the action. head_tokens: K, how many of
    the likeliest tokens the engine tells of at each sampled place (`head.py`); 0 for none.
    """

    temperature: float = 1.0
    max_turn_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    head_tokens: int = 0


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
    head_ids, head_logprobs: int32 and float32 [m, K], see `head.py`; None unless asked for.
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
    head_ids: Int32 | None = None
    head_logprobs: Float32 | None = None

    def __post_init__(self) -> None:
        for name, dtype in _TURN_ARRAYS:
            array = np.ascontiguousarray(getattr(self, name), dtype)
            if array.ndim != 1:
                raise TrajectoryError("bad_shape", f"{name} must be one-dimensional")
            array.setflags(write=False)
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
        if self.head_ids is not None or self.head_logprobs is not None:
            ids, logprobs = read_only_heads(self.head_ids, self.head_logprobs, tokens)
            object.__setattr__(self, "head_ids", ids)
            object.__setattr__(self, "head_logprobs", logprobs)

    @property
    def head_tokens(self) -> int:
        """K of the head; 0 without one."""
        return 0 if self.head_ids is None else self.head_ids.shape[1]


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """One trajectory as aligned arrays of length T, in context order.

    token_ids int32, action_mask bool (true on sampled tokens), behaviour_logprobs float32
    (0 where not sampled), behaviour_steps int64 (-1 where not sampled), turn_ids int32 (-1 where
    not sampled). head_ids int32 [T, K] and head_logprobs float32 [T, K] (-1 and -inf where not
    sampled); None unless they were asked for.
    """

    token_ids: Int32
    action_mask: Bool
    behaviour_logprobs: Float32
    behaviour_steps: Int64
    turn_ids: Int32
    head_ids: Int32 | None = None
    head_logprobs: Float32 | None = None

    @property
    def head_tokens(self) -> int:
        """K of the heads; 0 without."""
        return 0 if self.head_ids is None else self.head_ids.shape[1]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished episode.

    trajectory_id: unique in the run. group_id, member: its group and its place in it.
    reward: finite; reward_parts: named parts, for inspection. Raises TrajectoryError where a turn
    has another head than `sampling` asked for.
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

    def __post_init__(self) -> None:
        asked = self.sampling.head_tokens
        for turn in self.turns:
            if turn.head_tokens != asked:
                detail = f"heads of {asked} tokens were asked for, a turn has {turn.head_tokens}"
                raise TrajectoryError("length_mismatch", detail)

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
    def head_bytes(self) -> int:
        """Bytes of the heads of all sampled tokens."""
        return self.action_tokens * self.sampling.head_tokens * BYTES_PER_HEAD_TOKEN

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
        if not self.sampling.head_tokens:
            return FlatTokens(token_ids, action_mask, logprobs, steps, turn_ids)
        heads = self._flat_heads(action_mask)
        return FlatTokens(token_ids, action_mask, logprobs, steps, turn_ids, *heads)

    def _flat_heads(self, action_mask: Bool) -> tuple[Int32, Float32]:
        shape = (len(action_mask), self.sampling.head_tokens)
        ids = np.full(shape, NO_TOKEN, np.int32)
        logprobs = np.full(shape, -np.inf, np.float32)
        ids[action_mask] = np.concatenate([turn.head_ids for turn in self.turns])
        logprobs[action_mask] = np.concatenate([turn.head_logprobs for turn in self.turns])
        return ids, logprobs


@dataclass(frozen=True, eq=False)
class TrajectoryGroup:
    """The surviving siblings of one task.

    run_id: the run that issued it; data of another run is refused.
    expected_size: how many rollouts were issued; `trajectories` holds the survivors.
    failures: how many members were dropped for each reason, and `failed_tokens` what they had
        sampled by then. filtered: the account of the survivors where the group filter dropped
        them; then `trajectories` is empty.
    """

    run_id: str
    group_id: str
    environment: str
    task_id: str
    expected_size: int
    trajectories: tuple[Trajectory, ...]
    failures: Mapping[DropReason, int] = field(default_factory=dict)
    failed_tokens: Mapping[DropReason, int] = field(default_factory=dict)
    filtered: GroupAccount | None = None

    @cached_property
    def version_span(self) -> VersionSpan:
        """Oldest and newest version over all members: a group's lag is its oldest member's."""
        spans = [trajectory.version_span for trajectory in self.trajectories]
        return VersionSpan(min(s.oldest for s in spans), max(s.newest for s in spans))

    @cached_property
    def action_tokens(self) -> int:
        """Sampled tokens of all survivors."""
        return sum(trajectory.action_tokens for trajectory in self.trajectories)

    @property
    def head_bytes(self) -> int:
        """Bytes of the heads of all survivors."""
        return sum(trajectory.head_bytes for trajectory in self.trajectories)
