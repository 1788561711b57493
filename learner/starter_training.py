"""The starter policy's model and its warm start on demonstrations of mixed quality.

Supervised learning on calculator episodes: cross-entropy on the tokens that the policy itself
would sample (calls, answer, end token), never on the prompt or the tool's replies. A fixed share
of every batch takes the operators in the wrong order, so the policy learns to write episodes and
copy tool replies, but not which order is right: that is left to reinforcement learning.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from actors.environments.calculator import CalculatorFamily, call_tool, solve

IGNORED = -100
"""Label of a token that is not trained on (the default of torch's cross-entropy)."""

Report = Callable[[int, int, float], None]
"""Hears (steps done, steps in all, loss of the last step)."""


@dataclass(frozen=True, slots=True)
class StarterSettings:
    """Everything that decides the starter policy; part of its cache key.

    right_order_share: share of demonstrations that take the operators in the right order.
    initializer_range: standard deviation of the first weights. Far above the usual 0.02: at this
        width it saves half of the steps.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    feed_forward: int = 384
    max_context_tokens: int = 256
    initializer_range: float = 0.08
    steps: int = 500
    batch_episodes: int = 32
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    demonstrated_tasks: int = 4000
    right_order_share: float = 0.5625
    heldout_tasks: int = 512


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode as token ids, and which of them the policy wrote. Both of length T."""

    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]


def build_model(settings: StarterSettings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A fresh model in fp32 from torch's global seed."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden,
            intermediate_size=settings.feed_forward,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.key_value_heads,
            head_dim=settings.hidden // settings.heads,
            max_position_embeddings=settings.max_context_tokens,
            initializer_range=settings.initializer_range,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            dtype="float32",
        )
    )


def demonstrate(
    expression: str, tokenizer: PreTrainedTokenizerFast, *, additive_first: bool
) -> Demonstration:
    """One written-out episode, laid out as a rollout lays it out."""
    solution = solve(expression, additive_first=additive_first)
    pieces: list[tuple[list[int], bool]] = [([tokenizer.bos_token_id], False)]
    pieces.append((_ids(tokenizer, expression), False))
    for call in solution.calls:
        pieces.append((_ids(tokenizer, call), True))
        pieces.append((_ids(tokenizer, call_tool(call) or ""), False))
    answer = [*_ids(tokenizer, f"={solution.answer}"), tokenizer.eos_token_id]
    pieces.append((answer, True))
    return Demonstration(
        token_ids=tuple(token for ids, _ in pieces for token in ids),
        action_mask=tuple(acted for ids, acted in pieces for _ in ids),
    )


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def collate(demonstrations: Sequence[Demonstration]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids and labels, int64 [B, T]; labels are IGNORED off the action mask."""
    length = max(len(demonstration.token_ids) for demonstration in demonstrations)
    token_ids = torch.zeros(len(demonstrations), length, dtype=torch.int64)
    labels = torch.full_like(token_ids, IGNORED)
    for row, demonstration in enumerate(demonstrations):
        ids = torch.tensor(demonstration.token_ids)
        token_ids[row, : len(ids)] = ids
        mask = torch.tensor(demonstration.action_mask)
        labels[row, : len(ids)] = torch.where(mask, ids, IGNORED)
    return token_ids, labels


def action_loss(
    model: Qwen3ForCausalLM, token_ids: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy in nats over the action tokens of int64 [B, T] ids; scalar.

    Causal attention keeps right padding out of every position that counts, so no mask is given,
    and the head is applied only where there is a label.
    """
    hidden = model.model(token_ids).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    acted = wanted != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[acted]), wanted[acted])


class DemonstrationDeck:
    """Draws batches with exactly the wanted share of demonstrations in the right order."""

    def __init__(
        self,
        settings: StarterSettings,
        tokenizer: PreTrainedTokenizerFast,
        family: CalculatorFamily,
        seed: int,
    ) -> None:
        self._draw = random.Random(seed)
        self._right = round(settings.right_order_share * settings.batch_episodes)
        self._wrong = settings.batch_episodes - self._right
        expressions = [
            str(family.task("train", index).payload["expression"])
            for index in range(settings.demonstrated_tasks)
        ]
        self._by_order = {
            additive_first: [
                demonstrate(expression, tokenizer, additive_first=additive_first)
                for expression in expressions
            ]
            for additive_first in (False, True)
        }

    def batch(self) -> list[Demonstration]:
        """The next batch."""
        right = self._draw.choices(self._by_order[False], k=self._right)
        return right + self._draw.choices(self._by_order[True], k=self._wrong)


def train(
    model: Qwen3ForCausalLM, deck: DemonstrationDeck, settings: StarterSettings, report: Report
) -> float:
    """Warm the model up in place; returns the mean loss of the last tenth of the steps."""
    optimiser = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=settings.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _scale(step, settings))
    losses = []
    model.train()
    for step in range(settings.steps):
        loss = action_loss(model, *collate(deck.batch()))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        report(step + 1, settings.steps, losses[-1])
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _scale(step: int, settings: StarterSettings) -> float:
    """Learning-rate factor: linear warm-up under a cosine down to a fiftieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    return min((step + 1) / settings.warmup_steps, 0.02 + 0.98 * cosine)
