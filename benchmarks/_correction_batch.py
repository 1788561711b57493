"""A batch that every recipe can work on: what the learner would bring, at the size asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from correction.batch_view import BatchView
from correction.composition import Recipe
from correction.objective import policy_objective, prepare
from tests.correction.micro_batches import (
    MicroBatch,
    denominators_of,
    inputs_of,
    make_batch,
    prepared_of,
)
from tests.numerics.peers.peer_batches import PeerBatch


@dataclass(frozen=True)
class CorrectionBatch:
    """The tensors of a micro-batch and of the whole batch, which it is here; float32."""

    micro: MicroBatch
    view: BatchView

    def prepare(self, recipe: Recipe) -> None:
        """What the recipe decides once for the batch: advantages, masks over the whole batch."""
        prepare(recipe, self.view, limit_tokens=self.view.action_mask.shape[1])

    def step(self, recipe: Recipe) -> None:
        """The recipe's objective with its diagnostics, forward and backward."""
        target = self.micro.target.clone().requires_grad_()
        objective = policy_objective(
            recipe,
            inputs_of(recipe, self.micro, target),
            prepared_of(recipe, self.micro),
            denominators_of(self.micro),
        )
        objective.loss.backward()  # type: ignore[no-untyped-call]


def correction_batch(peers: PeerBatch) -> CorrectionBatch:
    """Masks, turns and groups of the batch that the peers get, with all else that recipes need."""
    rows, columns = peers.mask.shape
    micro = make_batch(0, rows, columns, spread=0.02).to(torch.float32)
    micro = replace(
        micro,
        mask=peers.mask,
        turns=peers.turns,
        token_rewards=peers.token_rewards,
        prompt_mask=torch.arange(columns).expand(rows, columns) < columns // 8,
    )
    view = BatchView(
        rewards=peers.rewards,
        group_index=peers.group_index,
        action_mask=micro.mask,
        turn_ids=micro.turns,
        behaviour_logprobs=micro.behaviour,
        truncated=micro.truncated,
        scores=micro.proximal,
        reference_logprobs=micro.reference,
        values=micro.values,
        final_values=micro.final_values,
        teacher_logprobs=micro.proximal,
        teacher_versions=micro.lag,
        behaviour_versions=micro.lag,
        segment_ids=torch.where(micro.turns == 0, peers.group_index[:, None], -1),
        prompt_nll=-micro.prompt_target.sum(dim=1),
    )
    return CorrectionBatch(micro, view)


def with_heads(batch: CorrectionBatch, head_tokens: int) -> CorrectionBatch:
    """The batch with heads of as many tokens as a recipe asks of the engine."""
    # One more token stands for all the rest of the vocabulary.
    whole = torch.log_softmax(torch.randn(*batch.micro.mask.shape, head_tokens + 1), dim=-1)
    moved = torch.log_softmax(whole + 0.02 * torch.randn_like(whole), dim=-1)
    heads = {"head_target": whole[..., :-1], "head_behaviour": moved[..., :-1]}
    return replace(batch, micro=replace(batch.micro, **heads))
