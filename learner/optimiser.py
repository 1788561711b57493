"""The optimiser behind every ZeRO stage: AdamW, its parameter groups, its learning-rate schedule.

DeepSpeed's ZeRO optimisers (stages 1 to 3) clip, measure the gradient norm and refuse a step whose
gradient is not finite. At stage 0 in fp32 it does none of the last two, so `GuardedAdamW` does,
under the attribute names that DeepSpeed's engine reads from any optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from learner.settings import OptimiserSettings

PEAK = "peak_learning_rate"
"""Key of a parameter group: its peak learning rate, None for the settings' own."""


def learning_rate_at(
    settings: OptimiserSettings, applied_steps: int, peak: float | None = None
) -> float:
    """Learning rate of the optimiser step that follows `applied_steps` applied ones.

    peak: another than the settings' own, for the same warm-up and decay. A function of applied
    steps only: a refused step does not move the schedule, and a checkpoint needs no schedule state.
    """
    peak = settings.learning_rate if peak is None else peak
    if applied_steps < settings.warmup_steps:
        return peak * (applied_steps + 1) / settings.warmup_steps
    if settings.decay_steps is None:
        return peak
    left = (settings.decay_steps - applied_steps) / (settings.decay_steps - settings.warmup_steps)
    return peak * max(0.0, left)


def set_learning_rates(
    optimiser: torch.optim.Optimizer,
    settings: OptimiserSettings,
    applied_steps: int,
    factor: float = 1.0,
) -> float:
    """Set every group's rate for the coming step, times `factor`; returns the policy's."""
    for group in optimiser.param_groups:
        group["lr"] = factor * learning_rate_at(settings, applied_steps, group[PEAK])
    return factor * learning_rate_at(settings, applied_steps)


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that can clip by the global norm and refuses a gradient that is not finite.

    guard_clip: None leaves gradients alone (a ZeRO wrapper guards them); otherwise the largest
    norm, 0 for no clipping, and every `step` sets `overflow` and `_global_grad_norm`, the names
    that DeepSpeed's engine reads. Every rank must hold the same gradients, so all decide alike.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        settings: OptimiserSettings,
        guard_clip: float | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=learning_rate_at(settings, 0),
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=0.0,
        )
        self._guard_clip = guard_clip
        if guard_clip is not None:
            self.overflow = False
            self._global_grad_norm = 0.0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One AdamW step, or none where the guarded gradient norm is not finite."""
        if self._guard_clip is not None and not self._gradient_is_sound(self._guard_clip):
            return None
        loss: float | None = super().step(closure)
        return loss

    def _gradient_is_sound(self, clip: float) -> bool:
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._global_grad_norm = float(norm)
        self.overflow = not bool(torch.isfinite(norm))
        if not self.overflow and clip > 0.0:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        return not self.overflow


def parameter_groups(
    model: torch.nn.Module, settings: OptimiserSettings, peak: float | None = None
) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors (norms, biases) without; empty groups left out.

    peak: learning rate of this model where it is not that of the settings.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay, PEAK: peak},
        {"params": vectors, "weight_decay": 0.0, PEAK: peak},
    ]
    return [group for group in groups if group["params"]]
