"""Micro-batches for tests: tensors by seed, with any garbage at masked places, cut and padded."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from correction.aggregation import Denominators, count_denominators
from correction.composition import Recipe
from correction.objective import Objective, policy_objective
from correction.recipes import RECIPES, resolve

EVERY_RECIPE: tuple[Recipe, ...] = (
    *RECIPES.values(),
    *(
        resolve(name, overrides, max_lag_versions=4, group_size=4)
        for name, overrides in (
            ("decoupled_ppo", {"weight.bound": "band", "weight.low": 0.8, "weight.high": 1.2}),
            ("decoupled_ppo", {"weight.level": "turn_product", "weight.bound": "clip"}),
            ("decoupled_ppo", {"weight.level": "turn_geometric", "aggregation": "constant"}),
            ("decoupled_ppo", {"weight.level": "sequence_product", "weight.bound": "none"}),
            ("gspo", {"weight.bound": "band", "surrogate": {"clip_low": 0.2, "clip_high": 0.2}}),
            ("ppo_bypass", {"surrogate.dual_clip": 0, "aggregation": "token_sum"}),
            ("none", {"weight": "target_behaviour", "aggregation": "sequence_mean_token_sum"}),
            ("none", {"weight": "target_behaviour", "proximal": "behaviour"}),
        )
    ),
)


@dataclass(frozen=True)
class MicroBatch:
    """Arguments of `policy_objective`; [B, T] except advantages [B]."""

    target: Tensor
    proximal: Tensor
    behaviour: Tensor
    mask: Tensor
    lag: Tensor
    turns: Tensor
    advantages: Tensor

    def rows(self, order: list[int]) -> MicroBatch:
        """Some rows, in some order."""
        index = torch.tensor(order)
        return MicroBatch(*(getattr(self, field.name)[index] for field in fields(self)))

    def padded(self, columns: int) -> MicroBatch:
        """Masked columns in front and behind; turn ids stay in range because T grows."""
        pads = {
            field.name: torch.nn.functional.pad(
                getattr(self, field.name), (columns, columns), value=0
            )
            for field in fields(self)
            if field.name != "advantages"
        }
        return replace(self, **pads)

    def with_garbage(self, garbage: float) -> MicroBatch:
        """`garbage` at the masked places of every logprob, nonsense in the integers."""
        return replace(
            self,
            target=torch.where(self.mask, self.target, garbage),
            proximal=torch.where(self.mask, self.proximal, garbage),
            behaviour=torch.where(self.mask, self.behaviour, garbage),
            lag=torch.where(self.mask, self.lag, -(2**40)),
            turns=torch.where(self.mask, self.turns, 2**40),
        )

    def to(self, dtype: torch.dtype) -> MicroBatch:
        """Floating tensors in another dtype."""
        names = ("target", "proximal", "behaviour", "advantages")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


def make_batch(
    seed: int, rows: int = 4, columns: int = 6, spread: float = 0.5, density: float = 0.7
) -> MicroBatch:
    """A batch in float64. spread: size of the log ratios. Row 0 has an action token for sure."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    mask = torch.rand(rows, columns, generator=random) < density
    mask[0, 0] = True
    target = -normal(rows, columns).abs() - 0.1
    proximal = target + spread * normal(rows, columns)
    behaviour = proximal + spread * normal(rows, columns)
    lag = torch.randint(0, 12, (rows, columns), generator=random)
    turns = torch.randint(0, columns, (rows, columns), generator=random).sort(dim=1).values
    return MicroBatch(target, proximal, behaviour, mask, lag, turns, normal(rows))


def objective_of(
    recipe: Recipe,
    batch: MicroBatch,
    denominators: Denominators | None = None,
    target: Tensor | None = None,
) -> Objective:
    """`policy_objective` of a batch; its own counts and its own target unless given."""
    return policy_objective(
        recipe,
        target_logprobs=batch.target if target is None else target,
        proximal_logprobs=batch.proximal,
        behaviour_logprobs=batch.behaviour,
        advantages=batch.advantages,
        action_mask=batch.mask,
        lag_versions=batch.lag,
        turn_ids=batch.turns,
        denominators=denominators or count_denominators(batch.mask, max_tokens=8),
    )


def evaluate(
    recipe: Recipe, batch: MicroBatch, denominators: Denominators | None = None
) -> tuple[Objective, Tensor]:
    """The objective and its gradient in the target logprobs [B, T]."""
    target = batch.target.clone().requires_grad_()
    objective = objective_of(recipe, batch, denominators, target)
    (gradient,) = torch.autograd.grad(objective.loss, target)
    return objective, gradient


def recipe_label(recipe: Recipe) -> str:
    """Short name of a composition, for test ids."""
    weight = f"{recipe.weight.kind}-{recipe.weight.level}"
    return f"{recipe.name}-{recipe.proximal}-{weight}-{recipe.aggregation}"
