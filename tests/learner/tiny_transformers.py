"""Random transformers, a micro-batch of odd shapes for them, and what plain torch says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learner.batch import MicroBatch
from learner.critic import Critic, ModelCritic

VOCABULARY = 32
TEMPERATURE = (0.5, 1.0, 1.75)
LENGTHS_TOKENS = (9, 17, 12)
HEAD_WIDTH = 3


def tiny_transformer(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:  # noqa: ANN401
    import transformers

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.to(dtype).eval()


def made_up_micro_batch(padding_tokens: int = 0, fill: int = 0) -> MicroBatch:
    """Three rows: one that ends in observed text, one without padding, one with a single action."""
    generator = torch.Generator().manual_seed(1)
    total = max(LENGTHS_TOKENS)
    ids = torch.randint(0, VOCABULARY, (3, total), generator=generator)
    head = torch.randint(-1, VOCABULARY, (3, total, HEAD_WIDTH), generator=generator)
    action = torch.zeros(3, total, dtype=torch.bool)
    action[0, 3:5] = action[0, 6:8] = action[1, 1:17] = action[2, 11] = True
    prompt = torch.zeros_like(action)
    prompt[0, 1:3] = prompt[2, 1:11] = True
    lengths = torch.tensor(LENGTHS_TOKENS)
    ids = torch.where(torch.arange(total) < lengths[:, None], ids, fill)

    def padded(tensor: torch.Tensor, value: int = 0) -> torch.Tensor:
        columns = tensor.new_full((3, padding_tokens, *tensor.shape[2:]), value)
        return torch.cat((tensor, columns), dim=1)

    mask = padded(action)
    return MicroBatch(
        token_ids=padded(ids, fill),
        action_mask=mask,
        prompt_mask=padded(prompt),
        lengths_tokens=lengths,
        behaviour_logprobs=torch.zeros(mask.shape),
        lag_versions=torch.zeros(mask.shape, dtype=torch.int64),
        turn_ids=torch.zeros(mask.shape, dtype=torch.int64),
        row_index=torch.arange(3),
        temperature=torch.tensor(TEMPERATURE),
        filler=False,
        head_ids=padded(head, -1),
    )


def by_the_book(model: Any, critic: Critic, micro: MicroBatch) -> dict[str, Tensor]:  # noqa: ANN401
    """Everything from full logits and full hidden states, nothing chunked, nothing left out."""
    output = model(input_ids=micro.token_ids, output_hidden_states=True)
    hidden = output.hidden_states[-1]
    if isinstance(critic, ModelCritic):
        hidden = critic.trunk(input_ids=micro.token_ids).last_hidden_state
    elif critic.detach_trunk:
        hidden = hidden.detach()
    values: Any = (hidden @ critic.head.weight[0]) + critic.head.bias  # type: ignore[union-attr,index]

    def of_tokens(table: Tensor, ids: Tensor) -> Tensor:
        """table [B, T, V] at position t - 1 says what entry t of ids [B, T, K] gets."""
        shifted = table[:, :-1].gather(2, ids[:, 1:].clamp(min=0))
        return torch.nn.functional.pad(shifted, (0, 0, 1, 0))

    heated = torch.log_softmax(output.logits / micro.temperature[:, None, None], dim=-1)
    entropy = -(heated.exp() * heated).sum(dim=-1)
    own = micro.token_ids[..., None]
    plain = torch.log_softmax(output.logits, dim=-1)
    assert micro.head_ids is not None
    head_mask = (micro.head_ids >= 0) & micro.action_mask[..., None]
    before = torch.nn.functional.pad(torch.stack((entropy, values))[:, :, :-1], (1, 0))
    return {
        "logprobs": of_tokens(heated, own)[..., 0] * micro.action_mask,
        "entropy": before[0] * micro.action_mask,
        "prompt_logprobs": of_tokens(plain, own)[..., 0] * micro.prompt_mask,
        "head_logprobs": of_tokens(heated, micro.head_ids) * head_mask,
        "values": before[1] * micro.action_mask,
        "bootstrap_values": values[torch.arange(len(values)), micro.lengths_tokens - 1],
    }
