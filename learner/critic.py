"""The critic: what estimates the value of a state, the reward still to come.

Both kinds are modules inside the one that DeepSpeed wraps, so that one backward pass serves policy
and critic at every ZeRO stage:

    HeadCritic    a linear layer on the policy's last hidden state: no forward pass of its own
    ModelCritic   a transformer of its own with such a layer: twice the model, nothing shared
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from correction.errors import ConfigError
from learner.policy_model import load_policy
from learner.settings import LearnerSettings


class ValueHead(torch.nn.Linear):
    """One number for each hidden state, computed in fp32 whatever the training dtype.

    It starts at 0: the first values are then 0 and the first advantages plain returns, instead of
    noise of the hidden states' scale; it learns from the first step on, as its own gradient is
    the hidden state; and the policy below it gets no gradient from a head that knows nothing yet.
    """

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__(hidden, 1, dtype=dtype)

    def reset_parameters(self) -> None:
        """Zeros; no random number is drawn."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N] of hidden states [N, D]; fp32, or fp64 for fp64."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return torch.nn.functional.linear(hidden.to(wide), weight, bias)[:, 0]


class Critic(torch.nn.Module):
    """What both kinds share.

    Called with token_ids int64 [B, T], the policy's hidden states [B * T, D] (None unless
    `reads_policy`) and flat places [N] in [B, T]; gives the values [N] of the states after the
    tokens at these places. detach_trunk: the hidden states come without their graph.
    """

    reads_policy: bool
    detach_trunk: bool = False


class HeadCritic(Critic):
    """Reads the hidden states that the policy's output head reads."""

    reads_policy = True

    def __init__(self, hidden: int, dtype: torch.dtype, detach_trunk: bool) -> None:
        super().__init__()
        self.detach_trunk = detach_trunk
        self.head = ValueHead(hidden, dtype)

    def forward(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        """See Critic."""
        values: Tensor = self.head(hidden[places])
        return values


class ModelCritic(Critic):
    """A transformer without its output head, and a value head."""

    reads_policy = False

    def __init__(self, trunk: torch.nn.Module, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(hidden, dtype)

    def forward(self, token_ids: Tensor, hidden: None, places: Tensor) -> Tensor:
        """See Critic."""
        states = self.trunk(input_ids=token_ids, use_cache=False).last_hidden_state
        values: Tensor = self.head(states.flatten(0, 1)[places])
        return values


def build_critic(settings: LearnerSettings, policy: Any) -> Critic | None:  # noqa: ANN401
    """The critic that the settings ask for, in the training dtype; None for none.

    policy: the transformers model in training. Raises ConfigError for a critic's model that cannot
    be taken apart into a trunk and an output head.
    """
    chosen = settings.critic
    dtype = getattr(torch, settings.dtype)
    if chosen.kind == "none":
        return None
    if chosen.kind == "head":
        return HeadCritic(_head_inputs(policy), dtype, chosen.detach_trunk)
    path = chosen.path or settings.model_path
    model = load_policy(settings, path)
    if model.base_model is model:
        raise ConfigError(f"critic.path: {path} has no trunk apart from its output head")
    return ModelCritic(model.base_model, _head_inputs(model), dtype)


def _head_inputs(model: Any) -> int:  # noqa: ANN401
    """Width of the hidden states that a model's output head reads."""
    width: int = model.get_output_embeddings().weight.shape[1]
    return width
