from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from correction.errors import InputError
from correction.prompt_penalty import prompt_kl, prompt_weights

MASK = torch.tensor([[False, True, True, True], [False, True, False, False]])


def logprobs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """log theta with gradient and log ref of two prompts, the second one shorter."""
    random = torch.Generator().manual_seed(2)
    values = -torch.rand(2, 2, 4, generator=random, dtype=torch.float64) * 3 - 0.01
    return values[0].to(dtype).requires_grad_(), values[1].to(dtype)


def test_the_prompt_penalty_passes_gradcheck() -> None:
    target, reference = logprobs()
    assert torch.autograd.gradcheck(lambda values: prompt_kl(values, reference, MASK), (target,))


def test_it_pulls_each_token_to_the_start_model_from_either_side() -> None:
    target, reference = logprobs()
    (gradient,) = torch.autograd.grad(prompt_kl(target, reference, MASK).sum(), target)
    away = (target.detach() - reference)[MASK]
    assert (away > 0).any()
    assert (away < 0).any()
    assert torch.equal(gradient[MASK].sign(), away.sign())
    torch.testing.assert_close(gradient[MASK], 1.0 - (-away).exp())


def test_at_the_start_model_there_is_no_penalty_and_no_pull() -> None:
    target, _ = logprobs()
    penalty = prompt_kl(target, target.detach(), MASK)
    (gradient,) = torch.autograd.grad(penalty.sum(), target)
    assert not penalty.detach().any()
    assert not gradient.any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masked_places_change_no_bit(garbage: float, dtype: torch.dtype) -> None:
    def outcome(filler: float) -> tuple[Tensor, Tensor]:
        target, reference = (
            torch.where(MASK, values.detach(), filler) for values in logprobs(dtype)
        )
        target.requires_grad_()
        penalty = prompt_kl(target, reference, MASK)
        return penalty, torch.autograd.grad(penalty.sum(), target)[0]

    for left, right in zip(outcome(0.0), outcome(garbage), strict=True):
        assert torch.equal(left, right)
        assert not right.detach()[~MASK].any()


def test_missing_and_broken_prompt_logprobs_are_named() -> None:
    target, reference = logprobs()
    positive = torch.full_like(reference, 0.5)
    with pytest.raises(InputError, match="target_prompt_logprobs: missing, the prompt penalty"):
        prompt_kl(None, reference, MASK)
    with pytest.raises(InputError, match="reference_prompt_logprobs: missing, the prompt penalty"):
        prompt_kl(target, None, MASK)
    with pytest.raises(InputError, match=r"reference_prompt_logprobs: expected shape \[2, 4\]"):
        prompt_kl(target, reference[:, 1:], MASK)
    with pytest.raises(InputError, match="reference_prompt_logprobs: a logprob must be <= 0"):
        prompt_kl(target, positive, MASK)
    with pytest.raises(InputError, match="target_prompt_logprobs: 4 non-finite"):
        prompt_kl(torch.full_like(target, -math.inf), reference, MASK)
    with pytest.raises(InputError, match="prompt_mask: no place is true"):
        prompt_kl(target, reference, torch.zeros_like(MASK))


def test_the_weights_times_the_nll_are_its_mean_unless_clipped() -> None:
    nll = torch.tensor([3.0, 50.0, 0.5, 12.0], dtype=torch.float64)
    raw = prompt_weights(nll, clip=None)
    torch.testing.assert_close(raw * nll, nll.mean().expand(4))
    assert torch.equal(prompt_weights(nll, clip=2.0), raw.clamp(max=2.0))


def test_equally_likely_prompts_have_weight_one() -> None:
    assert prompt_weights(torch.full((3,), 7.3), clip=2.0).tolist() == [1.0] * 3


def test_the_weights_are_detached_and_of_the_dtype_of_the_nll() -> None:
    weights = prompt_weights(torch.tensor([1.0, 2.0], requires_grad=True), clip=None)
    assert weights.dtype == torch.float32
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("nll", "clip", "message"),
    [
        (torch.tensor([1.0, 0.0]), 2.0, "nll: a prompt's -log p must be > 0, got 0.0"),
        (torch.tensor([1.0, -3.0]), 2.0, "nll: a prompt's -log p must be > 0, got -3.0"),
        (torch.tensor([1.0, math.nan]), 2.0, "nll: 1 non-finite"),
        (torch.tensor([1, 2]), 2.0, "nll: expected a floating-point dtype"),
        (torch.ones(2, 2), 2.0, r"nll: expected shape \[Q\]"),
        (torch.ones(0), 2.0, r"nll: expected shape \[Q\]"),
        (torch.ones(2), 0.0, "clip: must be > 0 or None, got 0.0"),
        (torch.ones(2), math.nan, "clip: must be > 0 or None, got nan"),
    ],
)
def test_bad_weights_are_named(nll: Tensor, clip: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prompt_weights(nll, clip=clip)
