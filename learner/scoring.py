"""A whole batch under several policies, before the first optimiser step: what advantages need.

Each rank scores its own rows; then all ranks hold the scores of all rows, because advantages,
baselines and batch-wide masks are properties of the batch and not of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from correction.batch_view import BatchView
from correction.composition import Recipe
from correction.needs import Need
from correction.penalty_parts import PromptKl, PromptWeights
from learner.batch import LearnerBatch, MicroBatch, Plan, collate
from learner.forward import ForwardNeeds, ForwardOutputs


class ScoringEngine(Protocol):
    """What scoring needs of the model in training, on one rank."""

    @property
    def rank(self) -> int:
        """Place in the group, from 0."""
        ...

    def score(self, micro: MicroBatch, needs: ForwardNeeds) -> ForwardOutputs:
        """Outputs of the present policy without a graph. All ranks."""
        ...

    def reference(self, micro: MicroBatch, needs: ForwardNeeds) -> ForwardOutputs:
        """Outputs of the frozen reference policy without a graph. All ranks."""
        ...

    def gather_over_ranks(self, values: Tensor) -> list[Tensor]:
        """The same-shaped tensor of every rank, in order of rank. All ranks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """view: the batch with all that the recipe needs. reference_prompt_logprobs: [N, T] or None."""

    view: BatchView
    reference_prompt_logprobs: Tensor | None


def score_batch(
    engine: ScoringEngine, recipe: Recipe, batch: LearnerBatch, layout: Plan, learner_step: int
) -> ScoredBatch:
    """The batch as advantage estimators see it. All ranks, with the same batch and layout."""
    whole = collate(batch, range(len(batch.rows)), learner_step, heads=False)
    view = BatchView(
        rewards=batch.rewards,
        group_index=batch.group_index,
        action_mask=whole.action_mask,
        turn_ids=whole.turn_ids,
        behaviour_logprobs=whole.behaviour_logprobs,
        truncated=batch.truncated,
    )
    buffers = _Buffers(engine, batch, layout, learner_step, tuple(whole.action_mask.shape))
    needs, prompt = recipe.needs, Need.PROMPT in recipe.needs
    theta = reference = None
    if Need.SCORES in needs:
        values = Need.VALUES in needs
        theta = buffers.fill(_finite(engine), ForwardNeeds(prompt=prompt, values=values))
        view = replace(
            view,
            scores=theta.logprobs,
            values=theta.values,
            final_values=theta.bootstrap_values,
        )
    if Need.REFERENCE in needs:
        reference = buffers.fill(engine.reference, ForwardNeeds(prompt=prompt))
        view = replace(view, reference_logprobs=reference.logprobs)
    if prompt:
        view = replace(view, prompt_nll=_surprise(recipe, theta, reference))
    return ScoredBatch(view, reference.prompt_logprobs if reference is not None else None)


def _finite(engine: ScoringEngine) -> Callable[[MicroBatch, ForwardNeeds], ForwardOutputs]:
    """Scores that can be computed with: where theta's are not finite, the gradient of the pass that
    follows is not either, and refuses the step on all ranks."""

    def score(micro: MicroBatch, needs: ForwardNeeds) -> ForwardOutputs:
        return engine.score(micro, needs).with_finite(micro.behaviour_logprobs)

    return score


def _surprise(
    recipe: Recipe, theta: ForwardOutputs | None, reference: ForwardOutputs | None
) -> Tensor | None:
    """-log p of each row's prompt [N], of the policy whose surprise weighs prompts."""
    penalty = recipe.penalty_of(PromptKl)
    current = penalty is not None and penalty.weights is PromptWeights.CURRENT
    scored = theta if current else reference
    if scored is None or scored.prompt_logprobs is None:
        return None
    return -scored.prompt_logprobs.sum(dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """Fills [N, T] tensors of the whole batch from the micro-batches of all ranks."""

    engine: ScoringEngine
    batch: LearnerBatch
    layout: Plan
    learner_step: int
    shape: tuple[int, ...]

    def fill(
        self, scorer: Callable[[MicroBatch, ForwardNeeds], ForwardOutputs], needs: ForwardNeeds
    ) -> ForwardOutputs:
        """Outputs [N, T] of all rows, on every rank."""
        mine: dict[str, Tensor] = {}
        for rows in self.layout.ranks[self.engine.rank]:
            micro = collate(self.batch, rows, self.learner_step)
            outputs = scorer(micro, needs)
            if not micro.filler:
                self._place(mine, micro, outputs)
        return ForwardOutputs(**{name: self._of_all_ranks(part) for name, part in mine.items()})

    def _place(self, mine: dict[str, Tensor], micro: MicroBatch, outputs: ForwardOutputs) -> None:
        for name in ("logprobs", "prompt_logprobs", "values", "bootstrap_values"):
            part = getattr(outputs, name)
            if part is None:
                continue
            shape = self.shape if part.dim() == 2 else self.shape[:1]
            buffer = mine.setdefault(name, torch.zeros(shape, dtype=part.dtype))
            if part.dim() == 2:
                buffer[micro.row_index, : part.shape[1]] = part
            else:
                buffer[micro.row_index] = part

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        """Every row was filled by exactly one rank and is 0 on the others."""
        return torch.stack(self.engine.gather_over_ranks(mine)).sum(dim=0)
