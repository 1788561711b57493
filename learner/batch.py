"""From trajectory groups to what the ranks compute on.

    groups ──assemble──▶ LearnerBatch ──plan──▶ Plan: rows of each micro-batch of each rank
                                      └─collate─▶ MicroBatch: padded tensors [B, T]

Every rank holds the whole batch and makes the same plan, so nothing has to be agreed over the
network, and everything that is a property of the global batch (advantages, denominators, lag) is
computed from all of it, whatever the split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from actors.trajectory.record import Bool, FlatTokens, Int64, TrajectoryGroup
from correction.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryRow:
    """One trajectory as the learner sees it. group_index numbers the batch's groups from 0.

    truncated: the episode was cut by a limit, not finished by the environment.
    """

    tokens: FlatTokens
    reward: float
    group_index: int
    temperature: float
    reward_parts: Mapping[str, float]
    truncated: bool

    @property
    def length_tokens(self) -> int:
        """All tokens, observed and sampled."""
        return len(self.tokens.token_ids)


@dataclass(frozen=True, eq=False)
class LearnerBatch:
    """The rows of one batch, group by group."""

    rows: tuple[TrajectoryRow, ...]

    @cached_property
    def rewards(self) -> Tensor:
        """Float64 [N]."""
        return torch.tensor([row.reward for row in self.rows], dtype=torch.float64)

    @cached_property
    def group_index(self) -> Tensor:
        """Int64 [N]: the group of each row."""
        return torch.tensor([row.group_index for row in self.rows], dtype=torch.int64)

    @cached_property
    def truncated(self) -> Tensor:
        """Bool [N]: whether a limit cut the row."""
        return torch.tensor([row.truncated for row in self.rows], dtype=torch.bool)

    @cached_property
    def lengths_tokens(self) -> tuple[int, ...]:
        """Context tokens of each row."""
        return tuple(row.length_tokens for row in self.rows)

    @cached_property
    def action_tokens(self) -> int:
        """Sampled tokens of all rows."""
        return sum(int(row.tokens.action_mask.sum()) for row in self.rows)

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens before the first sampled one, but for each row's very first, of all rows."""
        return sum(int(_prompt_mask(row).sum()) for row in self.rows)

    def reward_means(self) -> tuple[float, dict[str, float]]:
        """Mean reward, and the mean of each named part over the trajectories that have it."""
        parts: dict[str, list[float]] = {}
        for row in self.rows:
            for name, value in row.reward_parts.items():
                parts.setdefault(name, []).append(value)
        means = {name: sum(values) / len(values) for name, values in sorted(parts.items())}
        return float(self.rewards.mean()), means

    def lag_histograms(self, learner_step: int) -> tuple[dict[int, int], dict[int, int]]:
        """Policy lag at a learner step: how many tokens, and how many trajectories, have which.

        A trajectory's lag is that of its oldest token.
        """
        lags = [lag_versions(row, learner_step)[row.tokens.action_mask] for row in self.rows]
        return _counted(np.concatenate(lags)), _counted(np.array([row.max() for row in lags]))


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rows go where: `ranks[r][m]` are the row numbers of rank r's micro-batch m.

    Every rank has the same number of micro-batches, because a backward pass may hold a collective;
    an empty one is a filler with weight 0. padded_tokens: tokens that will be computed, padding
    and fillers included; tokens: those that are real.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: int
    padded_tokens: int

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that are padding or filler."""
        return 1.0 - self.tokens / self.padded_tokens


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows padded on the right to a common length T; mask and lag say nothing about padding.

    token_ids int64, action_mask bool, behaviour_logprobs float32, lag_versions int64 (0 where not
    sampled), turn_ids int64 (-1 where not sampled), prompt_mask bool (true on what was observed
    before the first sampled token, but for position 0, about which no logits speak): all [B, T].
    lengths_tokens int64 [B]: real tokens. row_index int64 [B]: place in the batch. temperature
    float32 [B]. head_ids int64 [B, T, K] and head_behaviour_logprobs float32 [B, T, K]: the K
    likeliest tokens of mu at each sampled place, (-1, -inf) where there are none; None where the
    engines were not asked. filler: computed only so that all ranks take part; weight 0.
    """

    token_ids: Tensor
    action_mask: Tensor
    prompt_mask: Tensor
    lengths_tokens: Tensor
    behaviour_logprobs: Tensor
    lag_versions: Tensor
    turn_ids: Tensor
    row_index: Tensor
    temperature: Tensor
    filler: bool
    head_ids: Tensor | None = None
    head_behaviour_logprobs: Tensor | None = None


def assemble(groups: Sequence[TrajectoryGroup]) -> LearnerBatch:
    """All surviving trajectories of the groups as one batch.

    Raises InputError for no groups, for heads of different sizes, or for a trajectory that starts
    with a sampled token: nothing precedes it, so no logits of the learner speak about it.
    """
    rows = [
        TrajectoryRow(
            tokens=trajectory.flat(),
            reward=trajectory.reward,
            group_index=index,
            temperature=trajectory.sampling.temperature,
            reward_parts=trajectory.reward_parts,
            truncated=trajectory.truncated,
        )
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
    ]
    if not rows:
        raise InputError("groups: a batch needs at least one trajectory")
    if len({row.tokens.head_tokens for row in rows}) > 1:
        raise InputError("groups: all trajectories of a batch need heads of one size, or none")
    for row in rows:
        if row.tokens.action_mask[0]:
            raise InputError("groups: a trajectory must start with an observed token")
    return LearnerBatch(tuple(rows))


def lag_versions(row: TrajectoryRow, learner_step: int) -> Int64:
    """Policy lag of each token at a learner step; 0 where not sampled.

    Raises InputError for a token from the future: it is never lag 0.
    """
    lags = np.where(row.tokens.action_mask, learner_step - row.tokens.behaviour_steps, 0)
    if lags.min() < 0:
        raise InputError(f"groups: a token of a version after the learner's step {learner_step}")
    return lags


def _counted(values: Int64) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def plan(lengths_tokens: Sequence[int], world_size: int, micro_batch_tokens: int) -> Plan:
    """Spread rows over ranks by tokens, then each rank's rows over micro-batches.

    Longest first, each to the rank with the fewest tokens so far; a rank's rows are cut in order of
    length where the padded size would pass `micro_batch_tokens`. A single longer row is allowed.
    Deterministic.
    """
    order = sorted(range(len(lengths_tokens)), key=lambda row: (-lengths_tokens[row], row))
    loads = [0] * world_size
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for row in order:
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += lengths_tokens[row]
    cut = [_cut(share, lengths_tokens, micro_batch_tokens) for share in shares]
    most = max(len(micro_batches) for micro_batches in cut)
    ranks = tuple(tuple(mine) + ((),) * (most - len(mine)) for mine in cut)
    filler = lengths_tokens[order[-1]]
    padded = sum(
        len(rows) * lengths_tokens[rows[0]] if rows else filler for mine in ranks for rows in mine
    )
    return Plan(ranks, sum(lengths_tokens), padded)


def _cut(share: Sequence[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Cut rows that are sorted by falling length; the first of a piece is its longest."""
    pieces: list[list[int]] = []
    for row in share:
        if pieces and (len(pieces[-1]) + 1) * lengths[pieces[-1][0]] <= budget:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return [tuple(piece) for piece in pieces]


def collate(
    batch: LearnerBatch, rows: Sequence[int], learner_step: int, *, heads: bool = True
) -> MicroBatch:
    """Pad rows to tensors; no rows make a filler out of the shortest row of the batch.

    Padding is known by length alone: a token id never decides what is real. heads: whether those
    that the rows have are padded as well; a whole batch of them is large.
    """
    chosen = rows or [min(range(len(batch.rows)), key=batch.lengths_tokens.__getitem__)]
    picked = [batch.rows[row] for row in chosen]
    mask = _padded([row.tokens.action_mask for row in picked], False, torch.bool)
    return MicroBatch(
        token_ids=_padded([row.tokens.token_ids for row in picked], 0, torch.int64),
        action_mask=mask,
        prompt_mask=_padded([_prompt_mask(row) for row in picked], False, torch.bool),
        lengths_tokens=torch.tensor([row.length_tokens for row in picked], dtype=torch.int64),
        behaviour_logprobs=_padded(
            [row.tokens.behaviour_logprobs for row in picked], 0.0, torch.float32
        ),
        lag_versions=_padded([lag_versions(row, learner_step) for row in picked], 0, torch.int64),
        turn_ids=_padded([row.tokens.turn_ids for row in picked], -1, torch.int64),
        row_index=torch.tensor(chosen, dtype=torch.int64),
        temperature=torch.tensor([row.temperature for row in picked], dtype=torch.float32),
        filler=not rows,
        **(_heads(picked) if heads else {}),
    )


def _heads(picked: Sequence[TrajectoryRow]) -> dict[str, Tensor]:
    """The fields of the heads, where the engines were asked for some."""
    ids = [row.tokens.head_ids for row in picked if row.tokens.head_ids is not None]
    logprobs = [row.tokens.head_logprobs for row in picked if row.tokens.head_logprobs is not None]
    if not ids:
        return {}
    return {
        "head_ids": _padded(ids, -1, torch.int64),
        "head_behaviour_logprobs": _padded(logprobs, -math.inf, torch.float32),
    }


def _prompt_mask(row: TrajectoryRow) -> Bool:
    observed: Bool = np.cumsum(row.tokens.action_mask) == 0
    observed[0] = False
    return observed


def _padded(arrays: Sequence[np.ndarray], fill: float, dtype: torch.dtype) -> Tensor:
    longest = max(len(array) for array in arrays)
    result = torch.full((len(arrays), longest, *arrays[0].shape[1:]), fill, dtype=dtype)
    for row, array in enumerate(arrays):
        result[row, : len(array)] = torch.from_numpy(array.copy())
    return result
