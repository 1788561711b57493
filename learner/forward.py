"""One forward pass of the policy, and all that a step wants to know from it.

The logits at position t - 1 speak about token t, so entry t of a result belongs to token t, and
the value at t is that of the state before token t. Only positions that precede a wanted token
reach the output head: the logits of prompt and tool text would be most of the memory of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from correction.checks import require_given
from correction.errors import InputError
from learner.logprobs import RowScores, score_rows

if TYPE_CHECKING:
    from learner.batch import MicroBatch
    from learner.critic import Critic


@dataclass(frozen=True, slots=True)
class ForwardNeeds:
    """What is wanted beside the logprobs of the sampled tokens. Nothing of it costs by default.

    entropy: of the distribution that each sampled token came from. prompt: logprobs of what was
    observed before the first sampled token. head: logprobs at `MicroBatch.head_ids`. values: the
    critic's, of the state before each sampled token and after the last token of each row.
    """

    entropy: bool = False
    prompt: bool = False
    head: bool = False
    values: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutputs:
    """Float32, on the CPU; None where not wanted, 0 at places that nothing is said about.

    logprobs [B, T]: log theta of the sampled tokens at the sampling temperature. entropy [B, T], in
    nats: of the same distributions. prompt_logprobs [B, T]: log theta, at temperature 1, where
    `MicroBatch.prompt_mask`. head_logprobs [B, T, K]: at the sampling temperature. values [B, T]:
    where sampled. bootstrap_values [B]: of the state after the last real token.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    prompt_logprobs: Tensor | None = None
    head_logprobs: Tensor | None = None
    values: Tensor | None = None
    bootstrap_values: Tensor | None = None

    def with_finite(self, logprobs: Tensor) -> ForwardOutputs:
        """These outputs if all are finite; else with `logprobs` [B, T] and 0 where they are not."""
        parts = {
            field.name: part
            for field in fields(self)
            if (part := getattr(self, field.name)) is not None
        }
        finite = {name: torch.isfinite(part) for name, part in parts.items()}
        if all(bool(places.all()) for places in finite.values()):
            return self
        fill = {name: torch.zeros_like(part) for name, part in parts.items()}
        fill["logprobs"] = logprobs.to(self.logprobs.dtype)
        safe = {name: torch.where(finite[name], parts[name], fill[name]) for name in parts}
        return ForwardOutputs(**safe)

    def zero_loss(self) -> Tensor:
        """0 that depends on every output: the loss of a filler.

        Its gradient is 0, but it reaches every parameter that the other ranks' losses reach, so
        that all ranks take part in the same collectives.
        """
        parts = [getattr(self, field.name) for field in fields(self)]
        return torch.stack([(part * 0.0).sum() for part in parts if part is not None]).sum()


class RawOutputs(NamedTuple):
    """The fields of ForwardOutputs on the model's device.

    A named tuple, because DeepSpeed looks for tensors in tuples, not in dataclasses.
    """

    logprobs: Tensor
    entropy: Tensor | None
    prompt_logprobs: Tensor | None
    head_logprobs: Tensor | None
    values: Tensor | None
    bootstrap_values: Tensor | None

    def on_cpu(self) -> ForwardOutputs:
        """The same beside the micro-batch; the copy keeps the graph."""
        return ForwardOutputs(*(None if part is None else part.cpu() for part in self))  # type: ignore[arg-type]


def forward_arguments(
    micro: MicroBatch, needs: ForwardNeeds, device: torch.device
) -> dict[str, Any]:
    """Arguments of `PolicyForward` for a micro-batch. Raises InputError for a head without ids."""
    wanted = {
        "token_ids": micro.token_ids,
        "action_mask": micro.action_mask,
        "temperature": micro.temperature,
    }
    if needs.prompt:
        wanted["prompt_mask"] = micro.prompt_mask
    if needs.head:
        wanted["head_ids"] = require_given("head_ids", micro.head_ids, "head_logprobs")
    if needs.values:
        wanted["lengths_tokens"] = micro.lengths_tokens
    moved = {name: tensor.to(device) for name, tensor in wanted.items()}
    return {**moved, "entropy": needs.entropy}


class PolicyForward(torch.nn.Module):
    """A causal language model, and perhaps a critic, whose forward pass gives what a step wants.

    It is one module, and holds the model as `model` and the critic as `critic`, so that DeepSpeed
    wraps the whole of it and its ZeRO-3 hooks see every parameter. The model's own forward is
    used, with all that it does to its logits (soft-capping, scaling); a hook before the output head
    drops the positions that nobody asks about, and keeps the hidden states for the critic.
    """

    def __init__(self, model: torch.nn.Module, critic: Critic | None = None) -> None:
        super().__init__()
        self.model = model
        self.critic = critic
        self._wanted = torch.empty(0, dtype=torch.int64)
        self._keeps_hidden = False
        self._hidden: Tensor | None = None
        head = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_pre_hook(self._keep_wanted)

    def forward(
        self,
        token_ids: Tensor,
        action_mask: Tensor,
        temperature: Tensor,
        prompt_mask: Tensor | None = None,
        head_ids: Tensor | None = None,
        lengths_tokens: Tensor | None = None,
        entropy: bool = False,
    ) -> RawOutputs:
        """The outputs of one micro-batch, see ForwardOutputs; what is None is not wanted.

        token_ids: int64 [B, T], padded on the right with any id. action_mask, prompt_mask: bool
        [B, T], never both true. temperature: [B]. head_ids: int64 [B, T, K], padded with -1.
        lengths_tokens: int64 [B], the real tokens; given where values are wanted. Padding needs no
        attention mask: it stands to the right of every real token and attention is causal.

        Raises InputError for a wanted token at position 0, for head_ids outside of the vocabulary,
        and for values without a critic.
        """
        actions = _places("action_mask", action_mask)
        prompts = actions[:0] if prompt_mask is None else _places("prompt_mask", prompt_mask)
        tokens = torch.cat((actions, prompts))
        heat = temperature.to(torch.float32)[tokens // token_ids.shape[1]]
        heat[len(actions) :] = 1.0  # nothing was sampled in a prompt
        head = None if head_ids is None else _rows_of(head_ids, actions, len(tokens))
        logits = self._logits(token_ids, tokens, with_values=lengths_tokens is not None)
        scores = _score(logits, token_ids.flatten()[tokens], heat, entropy, head)
        values = bootstrap_values = None
        if lengths_tokens is not None:
            values, bootstrap_values = self._values(token_ids, actions, lengths_tokens)
        of_prompts = None if prompt_mask is None else scores.logprobs[len(actions) :]
        shape = token_ids.shape
        return RawOutputs(
            _spread(scores.logprobs, actions, shape),
            _spread(scores.entropy, actions, shape),
            _spread(of_prompts, prompts, shape),
            _spread(scores.head_logprobs, actions, shape),
            _spread(values, actions, shape),
            bootstrap_values,
        )

    def _logits(self, token_ids: Tensor, tokens: Tensor, with_values: bool) -> Tensor:
        """Logits [N, V] that speak about the tokens at flat places [N] of token_ids.

        The last token predicts nothing here, so the model sees it only where its value is asked.
        """
        self._keeps_hidden = with_values and self._critic().reads_policy
        if self._keeps_hidden:
            seen, self._wanted = token_ids, tokens - 1
        else:
            seen, self._wanted = token_ids[:, :-1], tokens - 1 - tokens // token_ids.shape[1]
        logits: Tensor = self.model(input_ids=seen, use_cache=False).logits[0]
        return logits

    def _keep_wanted(self, _head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
        if self._keeps_hidden:
            self._hidden = hidden.detach() if self._critic().detach_trunk else hidden
        return (hidden[self._wanted][None],)

    def _values(
        self, token_ids: Tensor, actions: Tensor, lengths_tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values [N] before the actions, and [B] after the last token of each row."""
        rows = torch.arange(len(token_ids), device=token_ids.device)
        ends = rows * token_ids.shape[1] + lengths_tokens - 1
        hidden, self._hidden = self._hidden, None
        values: Tensor = self._critic()(token_ids, hidden, torch.cat((actions - 1, ends)))
        return values[: len(actions)], values[len(actions) :]

    def _critic(self) -> Critic:
        if self.critic is None:
            raise InputError("values: this policy has no critic")
        return self.critic


def _places(name: str, mask: Tensor) -> Tensor:
    """Flat places [N] in [B, T] where the mask is true."""
    if bool(mask[:, 0].any()):
        raise InputError(f"{name}: no logits speak about the first token of a trajectory")
    return mask.flatten().nonzero()[:, 0]


def _score(
    logits: Tensor, ids: Tensor, temperature: Tensor, entropy: bool, head_ids: Tensor | None
) -> RowScores:
    if head_ids is not None and bool((head_ids >= logits.shape[1]).any()):
        raise InputError(f"head_ids: {int(head_ids.max())} is outside of the vocabulary")
    return score_rows(logits, ids, temperature, entropy=entropy, head_ids=head_ids)


def _rows_of(head_ids: Tensor, actions: Tensor, count: int) -> Tensor:
    """Head ids [count, K] of the wanted tokens: those of the actions, then padding."""
    rows = head_ids.new_full((count, head_ids.shape[2]), -1)
    rows[: len(actions)] = head_ids.flatten(0, 1)[actions]
    return rows


@overload
def _spread(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor: ...
@overload
def _spread(values: Tensor | None, places: Tensor, shape: torch.Size) -> Tensor | None: ...
def _spread(values: Tensor | None, places: Tensor, shape: torch.Size) -> Tensor | None:
    """The first N values [N or more, ...] put at flat places [N] of [B, T, ...], 0 elsewhere."""
    if values is None:
        return None
    whole = values.new_zeros(shape.numel(), *values.shape[1:])
    whole = whole.index_put((places,), values[: len(places)])
    return whole.view(*shape, *values.shape[1:])
