"""The Arrow schema of one trajectory group on the wire: one row a trajectory.

Token columns are flat over the turns of a trajectory; `turns` says how many of each belong to
each turn, in order. The action mask, turn ids and per-token versions are not stored: they follow
from `turns` and `version_runs` (`Trajectory.flat`), so that they cannot disagree with the tokens.

What is true of the whole group travels as one JSON object in the schema's metadata (`GROUP_KEY`),
so that a group without survivors (no rows) still says what failed:

    run_id, group_id, environment, task_id   strings
    expected_size                            how many rollouts were issued
    failures, failed_tokens                  {drop reason: members}, {drop reason: sampled tokens}
    filtered                                 `account.GroupAccount` of dropped survivors, or null

A group with heads (`head.py`) has three more columns at the end; one without spends nothing on
them. Place j of the head of sampled token i is value i * head_tokens + j of its row.

Any Arrow reader can open it; each field carries its meaning, unit and shape as metadata.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 3
"""Goes up with any change of columns, types or meaning; a reader refuses what it does not know."""

VERSION_KEY = b"lagwise.schema_version"
GROUP_KEY = b"lagwise.group"


def _field(
    name: str, type_: pa.DataType, meaning: str, unit: str = "", shape: str = ""
) -> pa.Field:
    metadata = {"meaning": meaning, "unit": unit, "shape": shape}
    return pa.field(
        name, type_, nullable=False, metadata={key: text for key, text in metadata.items() if text}
    )


def _list(value_type: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", value_type, nullable=False))


TURN = pa.struct(
    [
        _field("observation_tokens", pa.int32(), "observed before the call", "tokens"),
        _field("action_tokens", pa.int32(), "sampled by the call, at least 1", "tokens"),
        _field("version_runs", pa.int32(), "entries of `version_runs` that cover the action"),
        _field("finish", pa.string(), "'stop' (a stop token) or 'length' (token budget)"),
        _field("tool_calls", pa.int32(), "calls that the environment executed for the action"),
        _field("generation_s", pa.float64(), "time in the engine", "s"),
        _field("environment_s", pa.float64(), "time in the environment and its tools", "s"),
        _field("engine_incarnation", pa.string(), "engine process that sampled the turn"),
    ]
)

VERSION_RUN = pa.struct(
    [
        _field("epoch", pa.int32(), "learner incarnation"),
        _field("step", pa.int64(), "optimiser steps applied to the weights", "versions"),
        _field("length_tokens", pa.int32(), "consecutive sampled tokens of this version", "tokens"),
    ]
)

REWARD_PART = pa.struct(
    [
        _field("name", pa.string(), "name of the part, unique in the trajectory"),
        _field("value", pa.float64(), "its value, finite"),
    ]
)

SCHEMA = pa.schema(
    [
        _field("trajectory_id", pa.string(), "unique in the run"),
        _field("group_id", pa.string(), "the same in every row"),
        _field("member", pa.int32(), "place in the group, below expected_size"),
        _field("observation_ids", _list(pa.int32()), "observed token ids, all turns", "", "[N]"),
        _field("action_ids", _list(pa.int32()), "sampled token ids, all turns", "", "[M]"),
        _field(
            "behaviour_logprobs",
            _list(pa.float32()),
            "log mu of each sampled token, processed, at the sampling temperature",
            "nat",
            "[M]",
        ),
        _field("version_runs", _list(VERSION_RUN), "behaviour versions, run lengths", "", "[R]"),
        _field("turns", _list(TURN), "how the flat lists are cut into turns", "", "[turns]"),
        _field("reward", pa.float64(), "reward of the whole episode, finite"),
        _field("reward_parts", _list(REWARD_PART), "named parts, for inspection", "", "[parts]"),
        _field("end_reason", pa.string(), "`EndReason`: why the episode ended"),
        _field("temperature", pa.float64(), "sampling temperature, > 0"),
        _field("max_turn_tokens", pa.int32(), "most tokens that one turn could sample", "tokens"),
        _field("stop_token_ids", _list(pa.int32()), "tokens that end a turn", "", "[stops]"),
        _field("kv_mode", pa.string(), "`KvMode`: what a swap did to the KV cache"),
        _field("started_at_s", pa.float64(), "Unix time at which the rollout began", "s"),
        _field("duration_s", pa.float64(), "wall time of the episode", "s"),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""Columns of a group without heads."""

HEAD_SCHEMA = pa.schema(
    [
        *SCHEMA,
        _field("head_tokens", pa.int32(), "K, the same in every row, at least 1", "tokens"),
        _field(
            "head_ids", _list(pa.int32()), "likeliest ids, -1 for none", "", "[M * head_tokens]"
        ),
        _field(
            "head_logprobs",
            _list(pa.float32()),
            "log mu of each of head_ids, over the whole vocabulary; -inf for none",
            "nat",
            "[M * head_tokens]",
        ),
    ],
    metadata=SCHEMA.metadata,
)
"""Columns of a group with heads."""
