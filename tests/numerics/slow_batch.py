"""A whole batch as plain Python lists, from a seed, and the same batch as the tensors of a run.

Its trajectories lie from next to nothing to far away from mu, so that every bound, clip and mask
finds something to act on and something to leave alone. Masked places hold NaN in the tensors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from correction.batch_view import BatchView
from correction.composition import Recipe
from correction.needs import Need
from correction.policy_inputs import PolicyInputs, PromptInputs

Row = list[float]
SPREADS = (1e-4, 0.02, 0.3, 2.2, 1.2, 0.6, 5e-4, 1.8)
"""How far the log ratios of each trajectory lie from 0, in nats."""
BALANCED = 4
"""The trajectory whose geometric mean of prox/mu is 1, however far its tokens lie."""
GROUPS = (4, 4, 4, 9, 9, 9, 2, 2)
COLUMNS, HEAD, LIMIT_TOKENS = 6, 3, 6
LEAVES = ("theta", "values", "entropy", "head_theta", "prompt_theta")
"""What the loss is differentiated in."""


@dataclass(frozen=True)
class PlainBatch:
    """Rows are trajectories. Rows of numbers a place, but for those with one a trajectory.

    One a trajectory: groups, rewards, truncated, final_values, old_final_values, prompt_nll.
    A head of numbers a place: head_theta, head_mu.
    """

    groups: tuple[int, ...]
    rewards: Row
    truncated: list[bool]
    mask: list[list[bool]]
    turns: list[list[int]]
    lag: list[list[int]]
    segments: list[list[int]]
    prompt_mask: list[list[bool]]
    theta: list[Row]
    prox: list[Row]
    mu: list[Row]
    reference: list[Row]
    teacher: list[Row]
    values: list[Row]
    old_values: list[Row]
    final_values: Row
    old_final_values: Row
    entropy: list[Row]
    head_theta: list[list[Row]]
    head_mu: list[list[Row]]
    prompt_theta: list[Row]
    prompt_reference: list[Row]
    prompt_nll: Row


def make_batch(seed: int, *, binary: bool = False) -> PlainBatch:
    """A batch by seed. binary: rewards of 0 and 1 only."""
    chance = random.Random(seed)
    rows, columns = range(len(GROUPS)), range(COLUMNS)

    def grid(number: Callable[[int], float]) -> list[Row]:
        return [[number(i) for _ in columns] for i in rows]

    def near(base: list[Row]) -> list[Row]:
        """Never above 0, apart by the spread of the row."""
        return [
            [min(x + SPREADS[i] * chance.gauss(0, 1), -1e-3) for x in row]
            for i, row in enumerate(base)
        ]

    mask = [[t == i % 4 or chance.random() < 0.8 for t in columns] for i in rows]
    mu = grid(lambda i: -0.2 - 2 * int(SPREADS[i]) - chance.expovariate(1.2))
    prox = near(mu)
    balance(prox[BALANCED], mu[BALANCED], mask[BALANCED])
    prompt = grid(lambda _: -0.5 - chance.expovariate(1.0))
    surprise = {group: chance.uniform(3, 30) for group in GROUPS}
    rewards = [chance.choice((0.0, 1.0)) for _ in rows]
    if not binary:
        rewards = [reward + chance.gauss(0, 0.5) for reward in rewards]
    head = [[head_of(chance) for _ in columns] for _ in rows]
    return PlainBatch(
        groups=GROUPS,
        rewards=rewards,
        truncated=[chance.random() < 0.4 for _ in rows],
        mask=mask,
        turns=[sorted(chance.choices(columns, k=COLUMNS)) for _ in rows],
        lag=[[chance.randrange(5) for _ in columns] for _ in rows],
        segments=[[5 if i < 2 and t < 3 else -1 for t in columns] for i in rows],
        prompt_mask=[[not true and chance.random() < 0.7 for true in row] for row in mask],
        theta=near(prox),
        prox=prox,
        mu=mu,
        reference=near(prox),
        teacher=near(mu),
        values=grid(lambda _: chance.gauss(0, 1)),
        old_values=grid(lambda _: chance.gauss(0, 1)),
        final_values=[chance.gauss(0, 1) for _ in rows],
        old_final_values=[chance.gauss(0, 1) for _ in rows],
        entropy=grid(lambda _: chance.expovariate(1.0)),
        head_theta=[[pair[0] for pair in row] for row in head],
        head_mu=[[pair[1] for pair in row] for row in head],
        prompt_theta=prompt,
        prompt_reference=[[min(x + chance.gauss(0, 0.3), -1e-3) for x in row] for row in prompt],
        prompt_nll=[surprise[group] for group in GROUPS],
    )


def balance(row: Row, other: Row, mask: list[bool]) -> None:
    """Shift a row so that its mean over action tokens is the other's."""
    away = [x - y for x, y, true in zip(row, other, mask, strict=True) if true]
    row[:] = [x - math.fsum(away) / len(away) for x in row]


def head_of(chance: random.Random) -> tuple[Row, Row]:
    """Logprobs of the first HEAD of five ids, under theta and under mu."""

    def logprobs() -> Row:
        logits = [chance.gauss(0, 1.2) for _ in range(5)]
        total = math.log(math.fsum(map(math.exp, logits)))
        return [logit - total for logit in logits[:HEAD]]

    return logprobs(), logprobs()


def narrowed(batch: PlainBatch) -> PlainBatch:
    """All numbers as float32 would hold them."""

    def narrow(numbers: object) -> object:
        if isinstance(numbers, list):
            return [narrow(number) for number in numbers]
        is_float = isinstance(numbers, float)
        return torch.tensor(numbers, dtype=torch.float32).item() if is_float else numbers

    changes: dict[str, Any] = {f.name: narrow(getattr(batch, f.name)) for f in fields(batch)}
    return replace(batch, **changes)


@dataclass(frozen=True)
class TorchBatch:
    """The same batch as tensors, for one recipe: what it does not need is not there."""

    recipe: Recipe
    plain: PlainBatch
    dtype: torch.dtype

    def grid(self, name: str, *, masked_by: str = "mask") -> Tensor:
        """[N, T] or [N, T, K] numbers, NaN where masked."""
        numbers = torch.tensor(getattr(self.plain, name), dtype=self.dtype)
        mask = torch.tensor(getattr(self.plain, masked_by))
        return numbers.where(mask.view(*mask.shape, *[1] * (numbers.dim() - 2)), torch.nan)

    def row(self, name: str) -> Tensor:
        """[N] numbers."""
        return torch.tensor(getattr(self.plain, name), dtype=self.dtype)

    def view(self) -> BatchView:
        """The batch before the first step."""
        plain, needs = self.plain, self.recipe.needs
        versions = torch.tensor(plain.lag)
        scored = Need.SCORES in needs
        return BatchView(
            rewards=self.row("rewards"),
            group_index=torch.tensor(plain.groups),
            action_mask=torch.tensor(plain.mask),
            turn_ids=torch.tensor(plain.turns),
            behaviour_logprobs=self.grid("mu"),
            truncated=torch.tensor(plain.truncated),
            scores=self.grid("prox") if scored else None,
            reference_logprobs=self.grid("reference") if Need.REFERENCE in needs else None,
            values=self.grid("old_values") if Need.VALUES in needs and scored else None,
            final_values=self.row("old_final_values") if Need.VALUES in needs and scored else None,
            teacher_logprobs=self.grid("teacher") if Need.TEACHER in needs else None,
            teacher_versions=versions,
            behaviour_versions=versions,
            segment_ids=torch.tensor(plain.segments) if Need.SEGMENTS in needs else None,
            prompt_nll=self.row("prompt_nll") if Need.PROMPT in needs else None,
        )

    def leaves(self) -> dict[str, Tensor]:
        """What the loss is differentiated in, by name."""
        return {
            name: self.grid(
                name, masked_by="prompt_mask" if name == "prompt_theta" else "mask"
            ).requires_grad_()
            for name in LEAVES
        }

    def inputs(self, leaves: dict[str, Tensor], rows: Tensor) -> PolicyInputs:
        """A micro-batch of some rows, from leaves of the whole batch."""
        plain, needs = self.plain, self.recipe.needs
        cut = {name: leaf[rows] for name, leaf in leaves.items()}
        prompt = PromptInputs(
            cut["prompt_theta"],
            self.grid("prompt_reference", masked_by="prompt_mask")[rows],
            torch.tensor(plain.prompt_mask)[rows],
        )
        head = Need.HEAD in needs
        keeps = self.recipe.needs_proximal_pass and Need.SCORES not in needs
        return PolicyInputs(
            target_logprobs=cut["theta"],
            behaviour_logprobs=self.grid("mu")[rows],
            lag_versions=torch.tensor(plain.lag)[rows],
            turn_ids=torch.tensor(plain.turns)[rows],
            proximal_logprobs=self.grid("prox")[rows] if keeps else None,
            entropy=cut["entropy"] if Need.ENTROPY in needs else None,
            values=cut["values"] if Need.VALUES in needs else None,
            final_values=self.row("final_values")[rows] if Need.VALUES in needs else None,
            head_target_logprobs=cut["head_theta"] if head else None,
            head_behaviour_logprobs=self.grid("head_mu")[rows] if head else None,
            prompt=prompt if Need.PROMPT in needs else None,
        )
