"""One batch, `max_reuse` optimiser passes: the learner's step.

    LearnerBatch ─▶ advantages, denominators (global, once)
         each pass: lag measured again ─▶ micro-batches ─▶ objective ─▶ backward ─▶ optimiser step

The proximal policy is the target policy as it was before the first pass. The first pass computes
it anyway, so its detached logprobs are kept and no extra forward pass is made for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from correction.errors import InputError
from correction.objective import (
    Denominators,
    add_sums,
    group_advantages,
    policy_objective,
    summarise,
)
from correction.versions import PolicyVersion
from learner.batch import LearnerBatch, MicroBatch, Plan, collate, plan
from learner.settings import LearnerSettings


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One optimiser step: whether it changed the weights, with what norm and rate.

    gradient_norm: global, before clipping; infinite or NaN where the step was refused. Logprobs
    of the model that are not finite make it so.
    """

    applied: bool
    gradient_norm: float
    learning_rate: float


class PolicyEngine(Protocol):
    """What a step needs of the model in training, on one rank."""

    @property
    def rank(self) -> int:
        """Place in the group, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Target logprobs, float32 [B, T] on the CPU or a GPU, with a graph. All ranks."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of the global loss. All ranks."""
        ...

    def step(self) -> StepOutcome:
        """Apply the accumulated gradient, or refuse it. All ranks."""
        ...

    def gather_over_ranks(self, values: Tensor) -> list[Tensor]:
        """The same-shaped tensor of every rank, in order of rank. All ranks."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimiser pass over a batch; the same on every rank but for the times.

    version: after the pass. reuse: how many passes the batch has served, this one included.
    loss: global. metrics: from `correction.objective.summarise`. lag_tokens, lag_trajectories:
    how many have which policy lag, measured as the pass began. reward_mean, reward_parts: over the
    trajectories of the batch, a part's over those that have it. padding_waste: share of computed
    tokens that were padding. phases_s: seconds of `collate`, `forward_backward`, `optimiser`,
    and `decode` in the first pass.
    """

    version: PolicyVersion
    applied: bool
    reuse: int
    loss: float
    gradient_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    lag_tokens: Mapping[int, int]
    lag_trajectories: Mapping[int, int]
    trajectories: int
    action_tokens: int
    padding_waste: float
    reward_mean: float
    reward_parts: Mapping[str, float]
    phases_s: Mapping[str, float]


@dataclass(slots=True)
class _Clock:
    """Seconds by phase."""

    phases_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        elapsed = time.perf_counter() - began
        self.phases_s[name] = self.phases_s.get(name, 0.0) + elapsed


@dataclass(frozen=True, slots=True)
class LearnerStep:
    """Trains one batch at a time on an engine, as the settings say."""

    engine: PolicyEngine
    settings: LearnerSettings

    def run(self, batch: LearnerBatch, version: PolicyVersion) -> list[StepReport]:
        """Up to `max_reuse` passes; one report each. All ranks, with the same batch.

        `version` is the learner's before the first pass. It moves on by one with each applied
        step. A refused step ends the passes: the same gradient would be refused again. Raises
        InputError for a batch with fewer trajectories than ranks.
        """
        ranks = self.engine.world_size
        if len(batch.rows) < ranks:
            raise InputError(f"batch: {len(batch.rows)} trajectories for {ranks} ranks")
        layout = plan(batch.lengths_tokens, ranks, self.settings.micro_batch_tokens)
        work = _BatchWork(self.engine, self.settings, batch, layout)
        reports: list[StepReport] = []
        for reuse in range(1, self.settings.max_reuse + 1):
            report = work.run_pass(version, reuse)
            reports.append(report)
            version = report.version
            if not report.applied:
                break
        return reports


class _BatchWork:
    """What stays the same over the passes of one batch: advantages, denominators, proximal."""

    def __init__(
        self, engine: PolicyEngine, settings: LearnerSettings, batch: LearnerBatch, layout: Plan
    ) -> None:
        self._engine = engine
        self._recipe = settings.recipe
        self._batch = batch
        self._layout = layout
        self._advantages = group_advantages(settings.recipe, batch.rewards, batch.group_index)
        self._denominators = Denominators(
            action_tokens=batch.action_tokens,
            trajectories=len(batch.rows),
            max_tokens=settings.max_trajectory_tokens,
        )
        self._proximal: dict[int, Tensor] = {}

    def run_pass(self, version: PolicyVersion, reuse: int) -> StepReport:
        """All micro-batches of this rank, then one optimiser step."""
        clock = _Clock()
        lag_tokens, lag_trajectories = self._batch.lag_histograms(version.step)
        sums: dict[str, Tensor] = {}
        for number, rows in enumerate(self._layout.ranks[self._engine.rank]):
            with clock.phase("collate"):
                micro = collate(self._batch, rows, version.step)
            with clock.phase("forward_backward"):
                sums = add_sums(sums, self._forward_backward(number, micro))
        with clock.phase("optimiser"):
            outcome = self._engine.step()
        metrics = summarise(_pool(self._engine, sums))
        reward_mean, reward_parts = self._batch.reward_means()
        return StepReport(
            version=version.next_step() if outcome.applied else version,
            applied=outcome.applied,
            reuse=reuse,
            loss=metrics["loss"],
            gradient_norm=outcome.gradient_norm,
            learning_rate=outcome.learning_rate,
            metrics=metrics,
            lag_tokens=lag_tokens,
            lag_trajectories=lag_trajectories,
            trajectories=len(self._batch.rows),
            action_tokens=self._batch.action_tokens,
            padding_waste=self._layout.padding_waste,
            reward_mean=reward_mean,
            reward_parts=reward_parts,
            phases_s=clock.phases_s,
        )

    def _forward_backward(self, number: int, micro: MicroBatch) -> dict[str, Tensor]:
        target = self._engine.logprobs(micro).cpu()
        if micro.filler:
            self._engine.backward(target.sum() * 0.0)
            return {}
        finite = torch.isfinite(target)
        scored = torch.where(finite, target, micro.behaviour_logprobs)
        objective = policy_objective(
            self._recipe,
            target_logprobs=scored,
            proximal_logprobs=self._proximal_of(number, scored),
            behaviour_logprobs=micro.behaviour_logprobs,
            advantages=self._advantages[micro.row_index],
            action_mask=micro.action_mask,
            lag_versions=micro.lag_versions,
            turn_ids=micro.turn_ids,
            denominators=self._denominators,
        )
        # Into the gradient with what is not: only there all ranks see it, and refuse together.
        self._engine.backward(objective.loss if bool(finite.all()) else target.sum() * math.nan)
        return objective.sums

    def _proximal_of(self, number: int, target: Tensor) -> Tensor | None:
        if not self._recipe.needs_proximal_pass:
            return None
        return self._proximal.setdefault(number, target.detach())


def _pool(engine: PolicyEngine, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Sums of all ranks, in one collective over one packed float64 vector.

    Gathered and added up in order of rank, not all-reduced: some sums combine by maximum.
    """
    names = sorted(sums)  # the order of the keys may differ from process to process
    packed = torch.stack([sums[name].double() for name in names])
    pooled: dict[str, float] = {}
    for vector in engine.gather_over_ranks(packed):
        pooled = add_sums(pooled, dict(zip(names, vector.tolist(), strict=True)))
    return pooled
