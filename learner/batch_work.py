"""The optimiser passes over one batch.

Contract
    consumes    a batch that every rank holds whole, and the plan of who computes what
    produces    one StepReport a pass, the same on every rank but for the times
    waits for   the other ranks, in every call of the engine
    invariants  advantages, denominators, scores and batch-wide masks are those of before the first
                pass; lag is measured anew in each; all ranks make the same calls in the same order

The proximal policy is the target policy as it was before the first pass. The first pass computes
it anyway, so its detached logprobs are kept and no extra forward pass is made for them, unless
something needs the scores of the whole batch beforehand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from correction.needs import Need
from correction.objective import (
    Objective,
    PolicyInputs,
    Prepared,
    add_sums,
    policy_objective,
    prepare,
    prompt_share,
    summarise,
)
from correction.penalty_parts import Pretraining
from correction.policy_inputs import PromptInputs
from correction.versions import PolicyVersion
from learner.batch import LearnerBatch, MicroBatch, Plan, collate
from learner.forward import ForwardNeeds, ForwardOutputs
from learner.policy_engine import PolicyEngine
from learner.pretraining import PretrainingStream
from learner.reports import StepReport
from learner.scoring import score_batch
from learner.settings import LearnerSettings


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


class BatchWork:
    """What stays the same over the passes of one batch, and the passes."""

    def __init__(
        self,
        engine: PolicyEngine,
        settings: LearnerSettings,
        batch: LearnerBatch,
        layout: Plan,
        *,
        learner_step: int,
        kl_coefficient: float | None,
        stream: PretrainingStream | None,
    ) -> None:
        """Scores the batch where the recipe needs it. All ranks.

        learner_step: version before the first pass. kl_coefficient: in force now, None for the
        recipe's. stream: pretraining text, where the recipe mixes it in.
        """
        self._engine = engine
        self._recipe = settings.recipe
        self._batch = batch
        self._layout = layout
        self._stream = stream
        self._micro_batch_tokens = settings.micro_batch_tokens
        self._first = _Clock()
        with self._first.phase("score"):
            scored = score_batch(engine, settings.recipe, batch, layout, learner_step)
            self._prepared = prepare(
                settings.recipe,
                scored.view,
                limit_tokens=settings.max_trajectory_tokens,
                kl_coefficient=kl_coefficient,
            )
        self._reference_prompts = scored.reference_prompt_logprobs
        self._denominators = self._prepared.denominators(
            settings.max_trajectory_tokens, batch.prompt_tokens
        )
        self._proximal: dict[int, Tensor] = {}
        needs = settings.recipe.needs
        self._needs = ForwardNeeds(
            entropy=Need.ENTROPY in needs,
            prompt=Need.PROMPT in needs,
            head=Need.HEAD in needs,
            values=Need.VALUES in needs,
        )

    def run_pass(self, version: PolicyVersion, reuse: int) -> StepReport:
        """All micro-batches of this rank, then one optimiser step."""
        clock, self._first = self._first, _Clock()
        lag_tokens, lag_trajectories = self._batch.lag_histograms(version.step)
        sums: dict[str, Tensor] = {}
        for number, rows in enumerate(self._layout.ranks[self._engine.rank]):
            with clock.phase("collate"):
                micro = collate(self._batch, rows, version.step)
            with clock.phase("forward_backward"):
                sums = add_sums(sums, self._forward_backward(number, micro))
        with clock.phase("forward_backward"):
            sums = add_sums(sums, self._pretrain(version.step))
        metrics = {**summarise(_pool(self._engine, sums)), **self._prepared.metrics}
        factor = self._recipe.control.learning_rate_factor(metrics)
        with clock.phase("optimiser"):
            outcome = self._engine.step(factor)
        if self._recipe.kl is not None:
            metrics["kl_coefficient"] = self._prepared.kl_coefficient
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
        outputs = self._engine.forward(micro, self._needs)
        if micro.filler:
            self._engine.backward(outputs.zero_loss())
            return {}
        prepared = self._prepared.rows(micro.row_index, micro.token_ids.shape[1])
        finite = outputs.with_finite(micro.behaviour_logprobs)
        objective = self._objective(number, micro, finite, prepared)
        # Into the gradient with what is not: only there all ranks see it, and refuse together.
        whole = finite is outputs
        self._engine.backward(objective.loss if whole else outputs.zero_loss() * math.nan)
        return objective.sums

    def _objective(
        self, number: int, micro: MicroBatch, outputs: ForwardOutputs, prepared: Prepared
    ) -> Objective:
        inputs = PolicyInputs(
            target_logprobs=outputs.logprobs,
            behaviour_logprobs=micro.behaviour_logprobs,
            lag_versions=micro.lag_versions,
            turn_ids=micro.turn_ids,
            proximal_logprobs=self._proximal_of(number, outputs.logprobs),
            entropy=outputs.entropy,
            values=outputs.values,
            final_values=outputs.bootstrap_values,
            head_target_logprobs=outputs.head_logprobs,
            head_behaviour_logprobs=micro.head_behaviour_logprobs,
            prompt=self._prompt(micro, outputs),
        )
        if bool(prepared.action_mask.any()):
            return policy_objective(self._recipe, inputs, prepared, self._denominators)
        # Nothing of these rows' actions may be seen: all the same figures, all 0.
        whole = replace(prepared, action_mask=micro.action_mask)
        counts = replace(
            self._denominators,
            action_tokens=self._batch.action_tokens,
            trajectories=len(self._batch.rows),
        )
        idle = policy_objective(self._recipe, inputs, whole, counts)
        sums = {name: total * 0.0 for name, total in idle.sums.items()}
        loss = idle.loss * 0.0
        for kind, share in prompt_share(self._recipe, inputs, self._denominators).items():
            loss = loss + share
            sums[f"loss_{kind}"] = sums["loss"] = share.detach().double()
        return Objective(loss, sums)

    def _prompt(self, micro: MicroBatch, outputs: ForwardOutputs) -> PromptInputs | None:
        if outputs.prompt_logprobs is None or self._reference_prompts is None:
            return None
        reference = self._reference_prompts[micro.row_index, : micro.token_ids.shape[1]]
        return PromptInputs(outputs.prompt_logprobs, reference, micro.prompt_mask)

    def _proximal_of(self, number: int, target: Tensor) -> Tensor | None:
        if not self._recipe.needs_proximal_pass or Need.SCORES in self._recipe.needs:
            return None
        return self._proximal.setdefault(number, target.detach())

    def _pretrain(self, position: int) -> dict[str, Tensor]:
        """Cross-entropy of pretraining text, added to the gradient; its sums."""
        penalty, stream = self._recipe.penalty_of(Pretraining), self._stream
        if penalty is None or stream is None:
            return {}
        blocks = stream.take(position)
        share = penalty.coefficient / stream.predicted_tokens_per_step
        loss = torch.zeros((), dtype=torch.float64)
        for rows in torch.split(blocks, max(1, self._micro_batch_tokens // blocks.shape[1])):
            total, _ = self._engine.cross_entropy(rows)
            self._engine.backward(share * total)
            loss += share * total.detach().double()
        return {"loss": loss, "loss_pretraining": loss}


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
