"""Logprobs and entropies of token distributions, from rows of logits.

With a vocabulary of 150 000 the logits are most of the memory of a step, so nothing of their size
in fp32 is ever kept: each pass goes over a few rows at a time, and the backward pass makes the
gradient of all that was asked of a row in one go, from the logits and one or two numbers a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**24
"""Logits that are turned into fp32 probabilities at a time (64 MiB)."""

LOWEST_LOGPROB = -1e4
"""In an entropy; its exponential is 0 in fp32 and fp64 alike."""


class RowScores(NamedTuple):
    """What is known of each row: fp32, or fp64 for fp64 logits.

    logprobs [N]: of the row's id. entropy [N], in nats, and head_logprobs [N, K]: None where not
    asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None
    head_logprobs: Tensor | None


def score_rows(
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor,
    *,
    entropy: bool = False,
    head_ids: Tensor | None = None,
) -> RowScores:
    """Score ids under softmax(logits / temperature), row by row; differentiable in the logits.

    logits: [N, V]. ids: int64 [N]. temperature: [N], > 0, of the result's dtype. entropy: whether
    that of each row is wanted. head_ids: int64 [N, K], more ids to score; a negative one is padding
    and gives 0.
    """
    return RowScores(*_Scores.apply(logits, ids, temperature, entropy, head_ids))  # type: ignore[no-untyped-call]


class _Scores(torch.autograd.Function):
    """Keeps the logits and, for each row, the normaliser and the entropy.

    F.log_softmax would keep an fp32 [N, V] for the backward pass beside the logits, and an entropy
    that is built from it two more.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        ids: Tensor,
        temperature: Tensor,
        entropy: bool,
        head_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        normalisers = torch.empty(len(ids), dtype=wide, device=logits.device)
        entropies = torch.empty_like(normalisers) if entropy else None
        for rows in _chunks(logits):
            scaled = logits[rows].to(wide) / temperature[rows, None]
            normalisers[rows] = torch.logsumexp(scaled, dim=-1)
            if entropies is not None:
                entropies[rows] = _entropies(scaled.sub_(normalisers[rows, None]))
        chosen = logits.gather(1, ids[:, None])[:, 0].to(wide) / temperature
        head = None
        if head_ids is not None:
            scaled = logits.gather(1, head_ids.clamp(min=0)).to(wide) / temperature[:, None]
            head = (scaled - normalisers[:, None]).masked_fill_(head_ids < 0, 0.0)
        ctx.save_for_backward(logits, ids, temperature, normalisers, entropies, head_ids)
        ctx.set_materialize_grads(False)
        return chosen - normalisers, entropies, head

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """With z the logits over T and p their softmax,

        d log p_i / dz_j = [i == j] - p_j        d entropy / dz_j = -p_j (log p_j + entropy)

        and each divided by the temperature once more for the logits themselves.
        """
        logits, ids, temperature, normalisers, entropies, head_ids = ctx.saved_tensors
        of_ids, of_entropy, of_head = gradients
        scale = torch.zeros_like(normalisers) if of_ids is None else of_ids / temperature
        pull, head_scale = scale, None
        if of_head is not None:
            head_scale = (of_head / temperature[:, None]).masked_fill_(head_ids < 0, 0.0)
            head_ids, pull = head_ids.clamp(min=0), scale + head_scale.sum(dim=-1)
        tilt = None if of_entropy is None else of_entropy / temperature
        result = torch.empty_like(logits)
        for rows in _chunks(logits):
            scaled = logits[rows].to(normalisers.dtype) / temperature[rows, None]
            part = scaled.sub_(normalisers[rows, None])
            if tilt is None:
                part = part.exp_().mul_(-pull[rows, None])
            else:
                part = _tilted(part, entropies[rows, None], tilt[rows, None], pull[rows, None])
            part.scatter_add_(1, ids[rows, None], scale[rows, None])
            if head_scale is not None:
                part.scatter_add_(1, head_ids[rows], head_scale[rows])
            result[rows] = part
        return result, None, None, None, None


def _entropies(log_p: Tensor) -> Tensor:
    """-sum p log p of each row [n]; overwrites log_p [n, V]."""
    _bound(log_p)
    return -log_p.exp().mul_(log_p).sum(dim=-1)


def _tilted(log_p: Tensor, entropies: Tensor, tilt: Tensor, pull: Tensor) -> Tensor:
    """-p (tilt (log p + entropy) + pull), overwriting log_p [n, V]; the others are [n, 1]."""
    _bound(log_p)
    factor = (log_p + entropies).mul_(tilt).add_(pull).neg_()
    return log_p.exp_().mul_(factor)


def _bound(log_p: Tensor) -> None:
    """Keep p log p = 0, not NaN, where a model has set a logit to minus infinity."""
    log_p.clamp_(min=LOWEST_LOGPROB)


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
