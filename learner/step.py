"""One batch, `max_reuse` optimiser passes: the learner's step.

    LearnerBatch ─▶ scores (where needed), advantages, denominators (global, once)
         each pass: lag measured again ─▶ micro-batches ─▶ objective ─▶ backward ─▶ optimiser step

The passes themselves are in `batch_work`.
"""

from __future__ import annotations

from correction.errors import InputError
from correction.versions import PolicyVersion
from learner.batch import LearnerBatch, plan
from learner.batch_work import BatchWork
from learner.policy_engine import PolicyEngine
from learner.pretraining import PretrainingStream
from learner.reports import StepOutcome, StepReport
from learner.settings import LearnerSettings

__all__ = ["LearnerStep", "PolicyEngine", "StepOutcome", "StepReport"]


class LearnerStep:
    """Trains one batch at a time on an engine, as the settings say.

    kl_coefficient: of the penalty towards the reference, which an adaptive one moves after every
    applied step; None where the recipe has no such penalty.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        settings: LearnerSettings,
        stream: PretrainingStream | None = None,
    ) -> None:
        """stream: pretraining text, where the recipe mixes it in."""
        self._engine = engine
        self._stream = stream
        self._settings = settings
        kl = settings.recipe.kl
        self.kl_coefficient = None if kl is None else kl.coefficient

    def run(self, batch: LearnerBatch, version: PolicyVersion) -> list[StepReport]:
        """Up to `max_reuse` passes; one report each. All ranks, with the same batch.

        `version` is the learner's before the first pass. It moves on by one with each applied
        step. A refused step ends the passes: the same gradient would be refused again. Raises
        InputError for a batch with fewer trajectories than ranks.
        """
        ranks = self._engine.world_size
        if len(batch.rows) < ranks:
            raise InputError(f"batch: {len(batch.rows)} trajectories for {ranks} ranks")
        work = BatchWork(
            self._engine,
            self._settings,
            batch,
            plan(batch.lengths_tokens, ranks, self._settings.micro_batch_tokens),
            learner_step=version.step,
            kl_coefficient=self.kl_coefficient,
            stream=self._stream,
        )
        reports: list[StepReport] = []
        for reuse in range(1, self._settings.max_reuse + 1):
            report = work.run_pass(version, reuse)
            reports.append(report)
            version = report.version
            if not report.applied:
                break
        self._adapt_kl(reports)
        return reports

    def _adapt_kl(self, reports: list[StepReport]) -> None:
        """Move the coefficient by what each applied pass measured."""
        kl = self._settings.recipe.kl
        for report in reports:
            measured = report.metrics.get("kl_k1_theta_reference")
            if kl is None or self.kl_coefficient is None or measured is None or not report.applied:
                continue
            self.kl_coefficient = kl.next_coefficient(
                self.kl_coefficient, measured, report.trajectories
            )
