"""Random transformers and a micro-batch of odd shapes for them."""

from __future__ import annotations

from typing import Any

import torch

from learner.batch import MicroBatch

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
