"""From the learner's report to the run's event."""

from __future__ import annotations

from cluster.observing.events import StepEvent
from learner.step import StepReport


def step_event(
    report: StepReport, passes: int, at_s: float, step_s: float, wait_s: float
) -> StepEvent:
    """What observers are told of one optimiser pass; its own seconds come from its phases."""
    return StepEvent(
        version=report.version,
        applied=report.applied,
        reuse_pass=report.reuse,
        passes=passes,
        at_s=at_s,
        step_s=step_s,
        wait_s=wait_s,
        reward_mean=report.reward_mean,
        reward_parts=report.reward_parts,
        loss=report.loss,
        gradient_norm=report.gradient_norm,
        learning_rate=report.learning_rate,
        action_tokens=report.action_tokens,
        trajectories=report.trajectories,
        lag_trajectories=report.lag_trajectories,
        lag_tokens=report.lag_tokens,
        metrics=report.metrics,
        phases_s=report.phases_s,
        padding_ratio=report.padding_waste,
    )
