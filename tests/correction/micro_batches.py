"""Micro-batches for tests: tensors by seed, with any garbage at masked places, cut and padded."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from correction.aggregation import Denominators, count_denominators
from correction.composition import Recipe
from correction.needs import Need
from correction.objective import Objective, PolicyInputs, Prepared, policy_objective
from correction.policy_inputs import PromptInputs
from correction.recipes import RECIPES, resolve

EVERY_RECIPE: tuple[Recipe, ...] = (
    *RECIPES.values(),
    *(
        resolve(name, overrides, max_lag_versions=8, group_size=4)
        for name, overrides in (
            ("decoupled_ppo", {"weight.bound": "band", "weight.low": 0.8, "weight.high": 1.2}),
            ("decoupled_ppo", {"weight.level": "turn_product", "weight.bound": "clip"}),
            ("decoupled_ppo", {"weight.level": "turn_geometric", "aggregation": "constant"}),
            ("decoupled_ppo", {"weight.level": "sequence_product", "weight.bound": "none"}),
            ("decoupled_ppo", {"trust": ["max_lag", "veto", "kpop", "trm", "k3_limit", "dppo_kl"]}),
            (
                "decoupled_gspo",
                {"weight.bound": "band", "surrogate": {"clip_low": 0.2, "clip_high": 0.2}},
            ),
            ("ppo_bypass", {"surrogate.dual_clip": 0, "aggregation": "token_sum"}),
            ("aipo", {"aggregation": "sequence_mean_token_sum"}),
            ("score_centering", {"surrogate.weight": "band"}),
            ("vtrace", {"advantage.unit": "token"}),
        )
    ),
)
CUT = {"advantages", "final_values", "baseline", "truncated", "log_expectation"}
"""Fields with one number a trajectory."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch and what was prepared for it; [B, T] except CUT [B] and heads [B, T, K]."""

    target: Tensor
    proximal: Tensor
    behaviour: Tensor
    mask: Tensor
    lag: Tensor
    turns: Tensor
    advantages: Tensor
    reference: Tensor
    token_rewards: Tensor
    truncated: Tensor
    baseline: Tensor
    values: Tensor
    final_values: Tensor
    old_values: Tensor
    value_targets: Tensor
    entropy: Tensor
    log_expectation: Tensor
    keep: Tensor
    head_target: Tensor
    head_behaviour: Tensor
    prompt_mask: Tensor
    prompt_target: Tensor
    prompt_reference: Tensor

    def rows(self, order: list[int]) -> MicroBatch:
        """Some rows, in some order."""
        index = torch.tensor(order)
        return MicroBatch(*(getattr(self, field.name)[index] for field in fields(self)))

    def padded(self, columns: int) -> MicroBatch:
        """Masked columns in front and behind; turn ids stay in range because T grows."""
        pads = {}
        for field in fields(self):
            values = getattr(self, field.name)
            if field.name not in CUT:
                deep = (0, 0) if values.dim() == 3 else ()
                pads[field.name] = torch.nn.functional.pad(values, (*deep, columns, columns))
        return replace(self, **pads)

    def with_garbage(self, garbage: float) -> MicroBatch:
        """`garbage` at the masked places of all floating tensors, nonsense in the integers."""
        dirty = {}
        for field in fields(self):
            values = getattr(self, field.name)
            if field.name in CUT or not values.is_floating_point():
                continue
            mask = self.prompt_mask if field.name.startswith("prompt") else self.mask
            # A reward where nothing was sampled is refused, so it is no garbage.
            if field.name != "token_rewards":
                dirty[field.name] = torch.where(
                    mask[..., None] if values.dim() == 3 else mask, values, garbage
                )
        return replace(
            self,
            lag=torch.where(self.mask, self.lag, -(2**40)),
            turns=torch.where(self.mask, self.turns, 2**40),
            **dirty,
        )

    def to(self, dtype: torch.dtype) -> MicroBatch:
        """Floating tensors in another dtype."""
        floating = {
            field.name: getattr(self, field.name).to(dtype)
            for field in fields(self)
            if getattr(self, field.name).is_floating_point()
        }
        return replace(self, **floating)


def make_batch(
    seed: int, rows: int = 4, columns: int = 6, spread: float = 0.5, density: float = 0.7
) -> MicroBatch:
    """A batch in float64. spread: size of the log ratios. Row 0 has an action token for sure."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def near(logprobs: Tensor) -> Tensor:
        """Other logprobs, `spread` apart, never above 0."""
        return (logprobs + spread * normal(*logprobs.shape)).clamp(max=0.0)

    mask = torch.rand(rows, columns, generator=random) < density
    mask[0, 0] = True
    target = -normal(rows, columns).abs() - 0.1
    proximal = near(target)
    behaviour = near(proximal)
    lag = torch.randint(0, 12, (rows, columns), generator=random)
    turns = torch.randint(0, columns, (rows, columns), generator=random).sort(dim=1).values
    advantages = normal(rows)
    head = torch.log_softmax(normal(rows, columns, 5), dim=-1)
    prompt_mask = ~mask & (torch.rand(rows, columns, generator=random) < 0.5)
    prompt_mask[0, -1] |= not bool(mask[0, -1])
    prompt = -normal(rows, columns).abs() - 0.1
    return MicroBatch(
        target=target,
        proximal=proximal,
        behaviour=behaviour,
        mask=mask,
        lag=lag,
        turns=turns,
        advantages=advantages,
        reference=near(target),
        token_rewards=torch.where(mask, normal(rows, columns), 0.0),
        truncated=torch.rand(rows, generator=random) < 0.5,
        baseline=normal(rows),
        values=normal(rows, columns),
        final_values=normal(rows),
        old_values=normal(rows, columns),
        value_targets=normal(rows, columns),
        entropy=normal(rows, columns).abs(),
        log_expectation=normal(rows) - 1.0,
        keep=torch.rand(rows, columns, generator=random) < 0.8,
        head_target=head[..., :4],
        head_behaviour=torch.log_softmax(head + spread * normal(rows, columns, 5), dim=-1)[..., :4],
        prompt_mask=prompt_mask,
        prompt_target=prompt,
        prompt_reference=near(prompt),
    )


def denominators_of(batch: MicroBatch) -> Denominators:
    """The batch's own counts."""
    counts = count_denominators(batch.mask, max_tokens=8)
    return replace(counts, prompt_tokens=max(1, int(batch.prompt_mask.sum())))


def prepared_of(recipe: Recipe, batch: MicroBatch) -> Prepared:
    """What the recipe would find prepared for the batch, advantages as they are."""
    kl = recipe.kl
    spread = batch.advantages[:, None].expand(batch.mask.shape)
    critic = recipe.critic.kind != "none"
    return Prepared(
        action_mask=batch.mask,
        # A padding row's advantage is never looked at; `prepare` puts 0 there.
        advantages=torch.where(batch.mask, spread, 0.0),
        token_rewards=batch.token_rewards,
        truncated=batch.truncated,
        kl_coefficient=kl.coefficient if kl else 0.0,
        baseline=batch.baseline,
        value_targets=batch.value_targets if critic else None,
        old_values=batch.old_values if critic else None,
        keep={rule.kind: batch.keep for rule in recipe.trust if rule.whole_batch},
        log_expectation=batch.log_expectation if recipe.surrogate.kind == "gepo" else None,
        reference_logprobs=batch.reference if Need.REFERENCE in recipe.needs else None,
    )


def inputs_of(recipe: Recipe, batch: MicroBatch, target: Tensor | None = None) -> PolicyInputs:
    """What the learner would bring: nothing that the recipe does not need."""
    needs = recipe.needs
    prompt = PromptInputs(batch.prompt_target, batch.prompt_reference, batch.prompt_mask)
    values, head = Need.VALUES in needs, Need.HEAD in needs
    return PolicyInputs(
        target_logprobs=batch.target if target is None else target,
        behaviour_logprobs=batch.behaviour,
        lag_versions=batch.lag,
        turn_ids=batch.turns,
        proximal_logprobs=batch.proximal,
        entropy=batch.entropy if Need.ENTROPY in needs else None,
        values=batch.values if values else None,
        final_values=batch.final_values if values else None,
        head_target_logprobs=batch.head_target if head else None,
        head_behaviour_logprobs=batch.head_behaviour if head else None,
        prompt=prompt if Need.PROMPT in needs else None,
    )


def objective_of(
    recipe: Recipe,
    batch: MicroBatch,
    denominators: Denominators | None = None,
    target: Tensor | None = None,
) -> Objective:
    """`policy_objective` of a batch; its own counts and its own target unless given."""
    return policy_objective(
        recipe,
        inputs_of(recipe, batch, target),
        prepared_of(recipe, batch),
        denominators or denominators_of(batch),
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
