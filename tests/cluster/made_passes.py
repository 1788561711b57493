"""The learner's real passes on a policy that is made up: its outputs are seeded numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from actors.trajectory.record import EndReason
from correction.composition import Recipe
from correction.needs import Need
from correction.parts import SEVERAL
from correction.recipes import RECIPES, resolve
from correction.versions import PolicyVersion
from learner.batch import MicroBatch, assemble
from learner.forward import ForwardNeeds, ForwardOutputs
from learner.pretraining import PretrainingStream
from learner.reports import StepOutcome, StepReport
from learner.settings import LearnerSettings, PretrainingSettings, RankPlace
from learner.step import LearnerStep
from tests.learner.learner_ranks import made_up_groups

NOT_IN_A_TRAJECTORY = {Need.TEACHER, Need.SEGMENTS, Need.EXPERT, Need.HEAD}
"""What the made-up trajectories do not hold."""


class MadeUpEngine:
    """A PolicyEngine of one rank; says something new about a micro-batch each time."""

    rank = 0
    world_size = 1

    def __init__(self, seed: int = 0) -> None:
        print(f"MadeUpEngine seed {seed}")
        self._random = torch.Generator().manual_seed(seed)

    def forward(self, micro: MicroBatch, needs: ForwardNeeds) -> ForwardOutputs:
        shape = micro.token_ids.shape
        return ForwardOutputs(
            logprobs=micro.behaviour_logprobs - self._numbers(*shape),
            entropy=self._numbers(*shape) if needs.entropy else None,
            prompt_logprobs=-self._numbers(*shape) if needs.prompt else None,
            values=self._numbers(*shape) if needs.values else None,
            bootstrap_values=self._numbers(shape[0]) if needs.values else None,
        )

    score = reference = forward

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def cross_entropy(self, token_ids: Tensor) -> tuple[Tensor, int]:
        return self._numbers(*token_ids.shape).sum(), token_ids.numel()

    def step(self, rate_factor: float = 1.0) -> StepOutcome:
        return StepOutcome(applied=True, gradient_norm=1.0, learning_rate=1e-5 * rate_factor)

    def gather_over_ranks(self, values: Tensor) -> list[Tensor]:
        return [values]

    def _numbers(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._random).requires_grad_()


def varied_recipes() -> Iterator[Recipe]:
    """Every recipe, and every trust mask and penalty alone on a plain one."""
    yield from RECIPES.values()
    for slot, kinds in SEVERAL.items():
        for kind in kinds:
            yield resolve("tis", {slot: [kind]}, max_lag_versions=8, group_size=4)


def passes(recipe: Recipe) -> list[StepReport]:
    """Two passes over 13 trajectories at lag 2 and more; every third trajectory was cut."""
    settings = LearnerSettings(
        run_id="", model_path="", recipe=recipe, max_trajectory_tokens=64, max_reuse=2
    )
    groups = [
        dataclasses.replace(
            group,
            trajectories=tuple(
                dataclasses.replace(
                    trajectory,
                    reward=float(member % 2),
                    end_reason=EndReason.MAX_TOKENS if member % 3 == 2 else EndReason.DONE,
                )
                for member, trajectory in enumerate(group.trajectories)
            ),
        )
        for group in made_up_groups()
    ]
    text = PretrainingSettings(path="made_up.txt", tokens_per_step=16, block_tokens=8)
    blocks = np.zeros((2, 8), dtype=np.int32)
    stream = PretrainingStream(blocks, text, seed=0, place=RankPlace())
    return LearnerStep(MadeUpEngine(), settings, stream).run(assemble(groups), PolicyVersion(0, 3))
