from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from correction.errors import InputError
from learner.critic import Critic, HeadCritic, ModelCritic
from learner.forward import (
    ForwardNeeds,
    ForwardOutputs,
    PolicyForward,
    RawOutputs,
    forward_arguments,
)
from tests.learner.tiny_transformers import by_the_book, made_up_micro_batch, tiny_transformer

ALL = ForwardNeeds(entropy=True, prompt=True, head=True, values=True)
KINDS = ["Qwen3", "Llama", "Gemma2"]
CRITICS = ["head", "detached head", "model"]
CPU = torch.device("cpu")
Named = dict[str, Tensor]


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


def made_up_critic(kind: str, policy: str, dtype: torch.dtype = torch.float32) -> Critic:
    """A critic whose head has learnt something already."""
    critic: Critic
    if kind == "model":
        critic = ModelCritic(tiny_transformer(policy, dtype, seed=7).base_model, 32, dtype)
    else:
        critic = HeadCritic(32, dtype, detach_trunk=kind == "detached head")
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(8)))
        critic.head.bias.fill_(0.25)
    return critic


def run(policy: PolicyForward, needs: ForwardNeeds = ALL, **shape: int) -> Named:
    outputs = policy(**forward_arguments(made_up_micro_batch(**shape), needs, CPU)).on_cpu()
    return named(outputs)


def named(outputs: ForwardOutputs | RawOutputs) -> Named:
    found = {
        name: getattr(outputs, name)
        for name in (field.name for field in dataclasses.fields(ForwardOutputs))
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def mixed_loss(outputs: Named) -> Tensor:
    """Each entry of each output with a factor of its own."""
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros(())
    for name in sorted(outputs):
        factors = torch.randn(outputs[name].shape, generator=generator)
        total = total + (outputs[name] * factors).sum()
    return total


def test_each_entry_belongs_to_its_own_token_with_unequal_prompts() -> None:
    ids = torch.tensor([[0, 1, 2, 3, 4, 0], [3, 2, 1, 0, 0, 0]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    result = PolicyForward(CountingModel())(ids, mask, torch.ones(2)).logprobs
    normaliser = torch.logsumexp(-torch.arange(5) / 100.0, dim=0)
    expected = torch.where(mask, -ids / 100.0 - normaliser, 0.0)
    torch.testing.assert_close(result, expected)


def test_only_positions_before_a_wanted_token_reach_the_head() -> None:
    model = CountingModel()
    ids, mask = torch.zeros(2, 50, dtype=torch.int64), torch.zeros(2, 50, dtype=torch.bool)
    mask[0, 40:43] = True
    prompt = torch.zeros_like(mask)
    prompt[0, 1:6] = True
    policy = PolicyForward(model)
    policy(ids, mask, torch.ones(2), entropy=True)
    assert model.rows_seen == 3
    policy(ids, mask, torch.ones(2), prompt_mask=prompt)
    assert model.rows_seen == 8


def test_only_what_is_needed_is_given() -> None:
    policy = PolicyForward(tiny_transformer("Qwen3"), made_up_critic("head", "Qwen3"))
    assert run(policy, ForwardNeeds()).keys() == {"logprobs"}
    assert run(policy, ForwardNeeds(entropy=True)).keys() == {"logprobs", "entropy"}
    assert run(policy, ForwardNeeds(prompt=True)).keys() == {"logprobs", "prompt_logprobs"}
    assert run(policy, ForwardNeeds(head=True)).keys() == {"logprobs", "head_logprobs"}
    values = run(policy, ForwardNeeds(values=True))
    assert values.keys() == {"logprobs", "values", "bootstrap_values"}


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradient_are_those_of_the_plain_model(kind: str, critic: str) -> None:
    # Gemma2 caps its logits after the head: the model's own forward must be used.
    plain_model, model = (tiny_transformer(kind, torch.float64) for _ in range(2))
    plain_critic, value = (made_up_critic(critic, kind, torch.float64) for _ in range(2))
    plain = torch.nn.ModuleDict({"model": plain_model, "critic": plain_critic})
    policy = PolicyForward(model, value)
    found, expected = run(policy), by_the_book(plain_model, plain_critic, made_up_micro_batch())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-12, rtol=1e-10, msg=name)
    ours, theirs = (
        torch.autograd.grad(mixed_loss(outputs), list(module.parameters()))
        for outputs, module in ((found, policy), (expected, plain))
    )
    for one, other in zip(ours, theirs, strict=True):
        # The norms of these models compute in fp32 whatever the dtype.
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_agrees_with_float64(kind: str) -> None:
    wide, narrow = (
        run(PolicyForward(tiny_transformer(kind, dtype), made_up_critic("head", kind, dtype)))
        for dtype in (torch.float64, torch.float32)
    )
    for name, tensor in narrow.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), wide[name], atol=5e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("critic", CRITICS)
def test_padding_changes_nothing_whatever_its_length_and_id(critic: str) -> None:
    policy = PolicyForward(tiny_transformer("Qwen3"), made_up_critic(critic, "Qwen3"))
    alone = run(policy)
    for fill in (0, 31):
        wide = run(policy, padding_tokens=13, fill=fill)
        for name, tensor in alone.items():
            kept = wide[name] if name == "bootstrap_values" else wide[name][:, :17]
            torch.testing.assert_close(kept, tensor, atol=1e-6, rtol=1e-6, msg=name)
            assert name == "bootstrap_values" or not wide[name][:, 17:].any()


@pytest.mark.parametrize("critic", ["head", "detached head"])
def test_the_value_head_needs_no_second_pass_of_the_policy(critic: str) -> None:
    model = tiny_transformer("Qwen3")
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    policy = PolicyForward(model, made_up_critic(critic, "Qwen3"))
    run(policy)
    assert len(passes) == 1
    assert policy._hidden is None, "the graph of the last batch is kept alive"


def test_a_detached_head_sends_no_gradient_into_the_policy() -> None:
    policy = PolicyForward(tiny_transformer("Qwen3"), made_up_critic("detached head", "Qwen3"))
    outputs = run(policy)
    torch.autograd.backward(outputs["values"].sum() + outputs["bootstrap_values"].sum())
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert policy.critic is not None
    assert all(parameter.grad is not None for parameter in policy.critic.parameters())


@pytest.mark.parametrize("critic", CRITICS)
def test_the_loss_of_a_filler_is_nothing_but_reaches_every_parameter(critic: str) -> None:
    policy = PolicyForward(tiny_transformer("Qwen3"), made_up_critic(critic, "Qwen3"))
    micro = made_up_micro_batch()
    outputs = policy(**forward_arguments(micro, ALL, CPU)).on_cpu()
    loss = outputs.zero_loss()
    assert loss.item() == 0.0
    loss.backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_wanted_token_at_the_first_position_is_refused() -> None:
    ids = torch.zeros(1, 3, dtype=torch.int64)
    policy = PolicyForward(CountingModel())
    with pytest.raises(InputError, match=r"action_mask: .*first token"):
        policy(ids, ids == 0, torch.ones(1))
    later = torch.tensor([[False, False, True]])
    with pytest.raises(InputError, match=r"prompt_mask: .*first token"):
        policy(ids, later, torch.ones(1), prompt_mask=~later)


def test_a_head_without_ids_or_outside_of_the_vocabulary_is_refused() -> None:
    micro = made_up_micro_batch()
    with pytest.raises(InputError, match="head_ids: missing"):
        forward_arguments(dataclasses.replace(micro, head_ids=None), ALL, CPU)
    assert micro.head_ids is not None
    beyond = micro.head_ids.clone()
    beyond[1, 1, 0] = 32
    arguments = forward_arguments(dataclasses.replace(micro, head_ids=beyond), ALL, CPU)
    policy = PolicyForward(tiny_transformer("Qwen3"), made_up_critic("head", "Qwen3"))
    with pytest.raises(InputError, match="head_ids: 32"):
        policy(**arguments)


def test_values_without_a_critic_are_refused() -> None:
    with pytest.raises(InputError, match=r"values: .*no critic"):
        run(PolicyForward(tiny_transformer("Qwen3")))
