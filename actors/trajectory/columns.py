"""What every column of a received group must satisfy.

Arrow has checked the offsets and lengths of its own arrays by then; here are the rules of the
record: how flat lists are cut into turns, which numbers are possible, which versions can exist.
Every function raises TrajectoryError with one of `REASONS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from actors.trajectory.head import check_head
from correction.errors import TrajectoryError
from correction.versions import PolicyVersion

_BYTES = "oversize truncated bad_checksum bad_stream compressed unknown_schema wrong_columns"
_GROUP = "bad_group wrong_run foreign_member unknown_member duplicate_member unaccounted_members"
_TOKENS = (
    "null_value bad_offsets bad_shape length_mismatch no_turns empty_action bad_token_id "
    "non_finite_logprob positive_logprob missing_version bad_version future_version "
    "bad_head head_mismatch"
)
_ROWS = "non_finite_reward duplicate_reward_part bad_cost bad_sampling unknown_value unencodable"
REASONS = frozenset(f"{_BYTES} {_GROUP} {_TOKENS} {_ROWS}".split())
"""Every `TrajectoryError.reason` that a group can be refused for: a bounded metric label."""

_HEAD_COLUMNS = ("head_ids", "head_logprobs")
_TOKEN_COLUMNS = ("observation_ids", "action_ids", "behaviour_logprobs", *_HEAD_COLUMNS)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A batch taken apart. Fields of lists of structs have dotted names: "turns.finish".

    tokens: NumPy views of the token columns, flat over the whole group.
    values: everything else as Python values, one a row, a turn, a version run, ...
    offsets: for each list column, rows + 1 positions in its flat values.
    """

    tokens: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    values: dict[str, list[Any]] = field(default_factory=dict)
    offsets: dict[str, list[int]] = field(default_factory=dict)

    @property
    def head_tokens(self) -> int:
        """K of the first row, which `check_columns` requires of all; 0 without heads."""
        return int(self.values["head_tokens"][0]) if "head_tokens" in self.values else 0


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where the turns of the group lie: turn j owns the positions [at[j], at[j + 1])."""

    observation_at: list[int]
    action_at: list[int]
    run_at: list[int]


def take_apart(batch: pa.RecordBatch) -> Columns:
    """Columns of a batch in which no value is missing and every list value belongs to a row."""
    columns = Columns()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        _refuse_nulls(name, column)
        if not isinstance(column, pa.ListArray):
            columns.values[name] = column.to_pylist()
            continue
        items, offsets = column.values, column.offsets.to_pylist()
        _refuse_nulls(name, items)
        if offsets[0] != 0 or offsets[-1] != len(items):
            raise TrajectoryError("bad_offsets", f"{name}: offsets do not cover its values")
        columns.offsets[name] = offsets
        if name in _TOKEN_COLUMNS:
            columns.tokens[name] = items.to_numpy()
        elif isinstance(items, pa.StructArray):
            for index, part in enumerate(items.type):
                _refuse_nulls(part.name, items.field(index))
                columns.values[f"{name}.{part.name}"] = items.field(index).to_pylist()
        else:
            columns.values[name] = items.to_pylist()
    return columns


def _refuse_nulls(name: str, array: pa.Array) -> None:
    if array.null_count:
        raise TrajectoryError("null_value", f"{name}: {array.null_count} values are missing")


def check_columns(columns: Columns, learner_version: PolicyVersion | None) -> Cuts:
    """Apply every rule of the record to a group with at least one row; say where its turns lie."""
    cuts = _cuts(columns)
    _check_tokens(columns)
    _check_heads(columns)
    _check_coverage(columns.values["version_runs.length_tokens"], cuts)
    _check_versions(columns.values, learner_version)
    _check_rows(columns.values)
    return cuts


def _cuts(columns: Columns) -> Cuts:
    turn_at = columns.offsets["turns"]
    if any(start == end for start, end in pairwise(turn_at)):
        raise TrajectoryError("no_turns", "a trajectory must have at least one turn")
    if min(columns.values["turns.action_tokens"]) < 1:
        raise TrajectoryError("empty_action", "a turn must have sampled at least one token")
    cuts = Cuts(
        _starts(columns, "observation_tokens", ("observation_ids",)),
        _starts(columns, "action_tokens", ("action_ids", "behaviour_logprobs")),
        _starts(columns, "version_runs", ("version_runs",)),
    )
    return cuts


def _starts(columns: Columns, count: str, lists: tuple[str, ...]) -> list[int]:
    """Prefix sums of a per-turn count, which must cut the lists as their own offsets do."""
    counts = columns.values[f"turns.{count}"]
    starts = list(accumulate(counts, initial=0))
    rows = [starts[turn] for turn in columns.offsets["turns"]]
    for name in lists:
        if min(counts) < 0 or columns.offsets[name] != rows:
            raise TrajectoryError("length_mismatch", f"{name} do not fit the turns' {count}")
    return starts


def _check_tokens(columns: Columns) -> None:
    for name in ("observation_ids", "action_ids"):
        ids = columns.tokens[name]
        if len(ids) and ids.min() < 0:
            raise TrajectoryError("bad_token_id", f"{name}: {ids.min()} is negative")
    logprobs = columns.tokens["behaviour_logprobs"]
    lowest, highest = float(logprobs.min()), float(logprobs.max())  # NaN comes through both
    if not -inf < lowest <= highest < inf:
        raise TrajectoryError("non_finite_logprob", "a behaviour logprob is not finite")
    if highest > 0:
        raise TrajectoryError("positive_logprob", f"a behaviour logprob of {highest}")


def _check_heads(columns: Columns) -> None:
    """One K for the whole group, as many heads as sampled tokens, and every head a right one."""
    if "head_tokens" not in columns.values:
        return
    head_tokens = columns.head_tokens
    if head_tokens < 1 or any(other != head_tokens for other in columns.values["head_tokens"]):
        raise TrajectoryError("bad_sampling", "head_tokens must be one number of at least 1")
    rows = [head_tokens * at for at in columns.offsets["action_ids"]]
    for name in _HEAD_COLUMNS:
        if columns.offsets[name] != rows:
            raise TrajectoryError("length_mismatch", f"{name} do not fit the sampled tokens")
    tokens = columns.tokens
    ids, logprobs = (tokens[name].reshape(-1, head_tokens) for name in _HEAD_COLUMNS)
    check_head(ids, logprobs, tokens["action_ids"], tokens["behaviour_logprobs"])


def _check_coverage(lengths: list[int], cuts: Cuts) -> None:
    ends = list(accumulate(lengths, initial=0))
    covered = [ends[run] for run in cuts.run_at]
    if min(lengths, default=0) < 1 or covered != cuts.action_at:
        raise TrajectoryError("missing_version", "version runs do not cover the sampled tokens")


def _check_versions(values: dict[str, list[Any]], learner: PolicyVersion | None) -> None:
    versions = set(zip(values["version_runs.epoch"], values["version_runs.step"], strict=True))
    if min(map(min, versions)) < 0:
        raise TrajectoryError("bad_version", "a negative epoch or step")
    newest = PolicyVersion(*max(versions))
    if learner is not None and newest > learner:
        raise TrajectoryError("future_version", f"{newest}, but the learner is at {learner}")


def _check_rows(values: dict[str, list[Any]]) -> None:
    for name in ("reward", "reward_parts.value"):
        if not all(-inf < reward < inf for reward in values[name]):
            raise TrajectoryError("non_finite_reward", f"{name} is not finite")
    if not all(0 < temperature < inf for temperature in values["temperature"]):
        raise TrajectoryError("bad_sampling", "temperature must be finite and above 0")
    if min(values["max_turn_tokens"]) < 1:
        raise TrajectoryError("bad_sampling", "max_turn_tokens must be at least 1")
    for name in ("tool_calls", "generation_s", "environment_s"):
        _check_cost(name, values[f"turns.{name}"])
    for name in ("started_at_s", "duration_s"):
        _check_cost(name, values[name])


def _check_cost(name: str, costs: list[float]) -> None:
    if not all(0 <= cost < inf for cost in costs):
        raise TrajectoryError("bad_cost", f"{name} must be finite and at least 0")
