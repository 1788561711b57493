"""Target logprobs of the sampled tokens, from a causal language model.

The logits at position t - 1 speak about token t, so entry t of the result belongs to token t.
Only positions that precede a sampled token reach the output head: with a vocabulary of 150 000
the logits of prompt and tool text would be most of the memory of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from correction.errors import InputError

CHUNK_ELEMENTS = 2**24
"""Logits that are turned into fp32 probabilities at a time (64 MiB)."""


class _SampledLogprob(torch.autograd.Function):
    """log softmax(logits / temperature)[id] row by row; keeps logits and one number a row.

    F.log_softmax would keep an fp32 [N, V] for the backward pass beside the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:  # noqa: ANN401
        wide = torch.promote_types(logits.dtype, torch.float32)
        normalisers = torch.empty(len(ids), dtype=wide, device=logits.device)
        for rows in _chunks(logits):
            scaled = logits[rows].to(wide) / temperature[rows, None]
            normalisers[rows] = torch.logsumexp(scaled, dim=-1)
        chosen = logits.gather(1, ids[:, None])[:, 0].to(wide) / temperature
        ctx.save_for_backward(logits, ids, temperature, normalisers)
        return chosen - normalisers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        logits, ids, temperature, normalisers = ctx.saved_tensors
        scale = gradients[0] / temperature
        result = torch.empty_like(logits)
        for rows in _chunks(logits):
            # d/dz_j log p(id) = [j == id] - p_j, each divided by the temperature.
            scaled = logits[rows].to(normalisers.dtype) / temperature[rows, None]
            part = scaled.sub_(normalisers[rows, None]).exp_().mul_(-scale[rows, None])
            part.scatter_add_(1, ids[rows, None], scale[rows, None])
            result[rows] = part
        return result, None, None


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def sampled_logprobs(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
    """Logprobs of given ids under logits [N, V] divided by a temperature.

    ids: int64 [N]. temperature: [N], > 0, of the result's dtype. Returns [N] in fp32, or fp64 for
    fp64 logits. Differentiable in the logits only.
    """
    result: Tensor = _SampledLogprob.apply(logits, ids, temperature)  # type: ignore[no-untyped-call]
    return result


class PolicyLogprobs(torch.nn.Module):
    """A causal language model whose forward pass gives logprobs of the sampled tokens.

    It is a module, and holds the model as `model`, so that DeepSpeed wraps the whole of it and its
    ZeRO-3 hooks see every parameter. The model's own forward is used, with all that it does to
    its logits (soft-capping, scaling); a hook before the output head drops the positions that
    nobody asks about.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self._wanted = torch.empty(0, dtype=torch.int64)
        head = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_pre_hook(self._keep_wanted)

    def _keep_wanted(self, _head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        hidden = inputs[0]
        return (hidden.reshape(-1, hidden.shape[-1])[self._wanted][None],)

    def forward(self, token_ids: Tensor, action_mask: Tensor, temperature: Tensor) -> Tensor:
        """Logprobs [B, T] of token_ids where action_mask, 0 elsewhere; fp32.

        token_ids: int64 [B, T], padded on the right with any id. action_mask: bool [B, T].
        temperature: [B]. Padding needs no attention mask: it stands to the right of every real
        token and attention is causal. Raises InputError for an action at position 0, which no
        logits speak about.
        """
        if bool(action_mask[:, 0].any()):
            raise InputError("action_mask: the first token of a trajectory cannot be an action")
        # The last token predicts nothing here, so the model does not see it.
        wanted = action_mask[:, 1:].flatten().nonzero()[:, 0]
        self._wanted = wanted
        logits = self.model(input_ids=token_ids[:, :-1], use_cache=False).logits[0]
        ids = token_ids[:, 1:].flatten()[wanted]
        rows = wanted // (token_ids.shape[1] - 1)
        chosen = sampled_logprobs(logits, ids, temperature.to(torch.float32)[rows])
        shifted = torch.zeros(action_mask[:, 1:].numel(), dtype=chosen.dtype, device=chosen.device)
        shifted = shifted.index_put((wanted,), chosen).view(len(token_ids), -1)
        return torch.nn.functional.pad(shifted, (1, 0))
