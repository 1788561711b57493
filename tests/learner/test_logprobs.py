from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from correction.errors import InputError
from learner import logprobs as module
from learner.logprobs import PolicyLogprobs, sampled_logprobs


class CountingModel(torch.nn.Module):
    """log p(token k | anything) = -k / 100, up to the normaliser that makes it one."""

    def __init__(self, vocabulary: int = 5) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2, vocabulary, bias=False)
        self.rows_seen = 0
        with torch.no_grad():
            self.head.weight[:, 0] = -torch.arange(vocabulary) / 100.0
            self.head.weight[:, 1] = 0.0

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = torch.ones(*input_ids.shape, 2)
        logits = self.head(hidden)
        self.rows_seen = logits.shape[0] * logits.shape[1]
        return SimpleNamespace(logits=logits)


def tiny_transformer(kind: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    config = getattr(transformers, f"{kind}Config")(**shape)
    model: torch.nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    return model


def by_the_book(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / T) [B, T, V] shifted right by one: entry t belongs to token t."""
    table = torch.log_softmax(logits.double() / temperature.double()[:, None, None], dim=-1)
    shifted = table[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(shifted, (1, 0))


def test_each_entry_belongs_to_its_own_token_with_unequal_prompts() -> None:
    ids = torch.tensor([[0, 1, 2, 3, 4, 0], [3, 2, 1, 0, 0, 0]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    result = PolicyLogprobs(CountingModel())(ids, mask, torch.ones(2))
    normaliser = torch.logsumexp(-torch.arange(5) / 100.0, dim=0)
    expected = torch.where(mask, -ids / 100.0 - normaliser, 0.0)
    torch.testing.assert_close(result, expected)


def test_only_positions_before_a_sampled_token_reach_the_head() -> None:
    model = CountingModel()
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask[0, 40:43] = True
    PolicyLogprobs(model)(torch.zeros(2, 50, dtype=torch.int64), mask, torch.ones(2))
    assert model.rows_seen == 3


def test_an_action_at_the_first_position_is_refused() -> None:
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="first token"):
        PolicyLogprobs(CountingModel())(ids, ids == 0, torch.ones(1))


@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Gemma2"])
def test_agrees_with_the_plain_model_at_each_rows_temperature(kind: str) -> None:
    # Gemma2 caps its logits after the head: the model's own forward must be used.
    model = tiny_transformer(kind)
    ids = torch.randint(0, 32, (3, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(3, 17, dtype=torch.bool)
    mask[0, 3:9] = mask[1, 1:17] = mask[2, 16:] = True
    temperature = torch.tensor([0.5, 1.0, 1.7])
    with torch.no_grad():
        expected = by_the_book(model(input_ids=ids).logits, ids, temperature)
        result = PolicyLogprobs(model)(ids, mask, temperature)
    torch.testing.assert_close(result.double(), expected * mask, atol=2e-6, rtol=1e-6)


def test_padding_changes_no_logprob_whatever_its_length_and_id() -> None:
    policy = PolicyLogprobs(tiny_transformer("Qwen3"))
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 4:] = True
    alone = policy(ids, mask, torch.ones(2))
    for fill in (0, 31):
        padded = torch.nn.functional.pad(ids, (0, 13), value=fill)
        wide = policy(padded, torch.nn.functional.pad(mask, (0, 13)), torch.ones(2))
        torch.testing.assert_close(wide[:, :9], alone, atol=1e-6, rtol=1e-6)
        assert not wide[:, 9:].any()


def test_the_gradient_is_exact() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    ids = torch.tensor([0, 6, 3, 3, 1, 5])
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.0, 3.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda given: sampled_logprobs(given, ids, temperature), (logits,)
    )


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(10, 7, generator=torch.Generator().manual_seed(4))
    ids, temperature = torch.arange(10) % 7, torch.full((10,), 0.8)

    def run() -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        value = sampled_logprobs(leaf, ids, temperature)
        (gradient,) = torch.autograd.grad(value.sin().sum(), leaf)
        return value.detach(), gradient

    whole = run()
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 21)
    for one, other in zip(run(), whole, strict=True):
        assert torch.equal(one, other)


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = (4 * torch.randn(5, 1000, generator=torch.Generator().manual_seed(5))).bfloat16()
    ids = torch.arange(5)
    result = sampled_logprobs(logits, ids, torch.ones(5))
    assert result.dtype == torch.float32
    expected = torch.log_softmax(logits.double(), dim=-1)[ids, ids]
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)
