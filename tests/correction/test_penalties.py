from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.errors import InputError
from correction.penalties import (
    KlEstimator,
    adaptive_coefficient,
    kl_penalty,
    kl_token_rewards,
    log_ratio_square,
)

K1, K2, K3, K3_PLUS = KlEstimator
every_estimator = pytest.mark.parametrize("estimator", list(KlEstimator))
quick = settings(max_examples=25, deadline=None)
MASK = torch.tensor([[True, True, False], [True, False, True]])


def logprobs(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """log theta with gradient, log ref and log mu of the same tokens [2, 3]."""
    random = torch.Generator().manual_seed(seed)
    values = -torch.rand(3, 2, 3, generator=random, dtype=torch.float64) * 3 - 0.01
    return values[0].to(dtype).requires_grad_(), values[1].to(dtype), values[2].to(dtype)


@pytest.mark.parametrize("estimator", [K1, K2, K3])
def test_kl_penalties_pass_gradcheck(estimator: KlEstimator) -> None:
    theta, reference, _ = logprobs(0)
    assert torch.autograd.gradcheck(
        lambda values: kl_penalty(values, reference, MASK, estimator), (theta,)
    )


@pytest.mark.parametrize("estimator", [K1, K3])
def test_reweighted_kl_penalties_pass_gradcheck_through_the_ratio(estimator: KlEstimator) -> None:
    theta, reference, mu = logprobs(1)
    assert torch.autograd.gradcheck(
        lambda values: kl_penalty(values, reference, MASK, estimator, log_importance=values - mu),
        (theta,),
    )


def test_the_square_of_the_log_ratio_passes_gradcheck() -> None:
    theta, _, mu = logprobs(2)
    assert torch.autograd.gradcheck(lambda values: log_ratio_square(values, mu, MASK), (theta,))


@pytest.mark.parametrize("reweighted", [False, True])
def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2(reweighted: bool) -> None:
    """Its value is detached from its gradient, so gradcheck does not apply."""
    theta, reference, mu = logprobs(3)
    importance = theta - mu if reweighted else None
    plus, k2, k3 = (
        kl_penalty(theta, reference, MASK, estimator, log_importance=importance)
        for estimator in (K3_PLUS, K2, K3)
    )
    assert torch.equal(plus, k3)
    slopes = [torch.autograd.grad(each.sum(), theta, retain_graph=True)[0] for each in (plus, k2)]
    assert torch.equal(*slopes)
    weight = (theta - mu).detach().exp() if reweighted else torch.ones_like(mu)
    wanted = (theta - reference).detach() * weight * MASK
    torch.testing.assert_close(slopes[0], wanted)


def exact_kl_gradients(
    logits: Tensor, mu: Tensor, reference: Tensor, estimator: KlEstimator, *, reweighted: bool
) -> Tensor:
    """Mean gradient in the logits of the estimator as a loss, over tokens of mu."""
    theta = logits.log_softmax(dim=-1)
    penalty = kl_penalty(
        theta[None],
        reference.log()[None],
        torch.ones(1, len(mu), dtype=torch.bool),
        estimator,
        log_importance=(theta - mu.log())[None] if reweighted else None,
    )
    (gradient,) = torch.autograd.grad((mu * penalty[0]).sum(), logits)
    return gradient


def categorical(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of theta with gradient, probabilities of mu and ref, and grad KL(theta || ref)."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 5, generator=random, dtype=torch.float64)
    logits, (mu, reference) = values[0].requires_grad_(), values[1:].softmax(dim=-1)
    theta = logits.log_softmax(dim=-1)
    (truth,) = torch.autograd.grad((theta.exp() * (theta - reference.log())).sum(), logits)
    return logits, mu, reference, truth


@every_estimator
@quick
@given(seed=st.integers(0, 2**31))
def test_reweighted_every_estimator_has_the_true_gradient_under_any_sampler(
    estimator: KlEstimator, seed: int
) -> None:
    logits, mu, reference, truth = categorical(seed)
    mean = exact_kl_gradients(logits, mu, reference, estimator, reweighted=True)
    torch.testing.assert_close(mean, truth, rtol=0, atol=1e-12)


@quick
@given(seed=st.integers(0, 2**31))
def test_on_policy_each_estimator_has_the_gradient_that_its_table_says(seed: int) -> None:
    logits, _, reference, truth = categorical(seed)
    theta = logits.detach().softmax(dim=-1)
    wanted = {K1: torch.zeros(5).double(), K2: truth, K3: theta - reference, K3_PLUS: truth}
    for estimator, gradient in wanted.items():
        mean = exact_kl_gradients(logits, theta, reference, estimator, reweighted=False)
        torch.testing.assert_close(mean, gradient, rtol=0, atol=1e-12)


def test_off_policy_without_the_ratio_the_gradient_is_another() -> None:
    logits, mu, reference, truth = categorical(7)
    for estimator in (K2, K3_PLUS):
        biased = exact_kl_gradients(logits, mu, reference, estimator, reweighted=False)
        assert float((biased - truth).abs().max()) > 0.01


@every_estimator
@pytest.mark.parametrize("reweighted", [False, True])
def test_at_the_reference_there_is_no_penalty_and_no_pull(
    estimator: KlEstimator, reweighted: bool
) -> None:
    theta, _, mu = logprobs(4)
    importance = theta - mu if reweighted else None
    penalty = kl_penalty(theta, theta.detach(), MASK, estimator, log_importance=importance)
    (gradient,) = torch.autograd.grad(penalty.sum(), theta)
    assert not penalty.detach().any()
    slope = (theta - mu).detach().exp() if reweighted else torch.ones_like(mu)
    wanted = slope * MASK if estimator is K1 else torch.zeros_like(mu)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=0)


@quick
@given(x=st.floats(-30, 30))
def test_k2_and_k3_are_never_negative_and_everything_is_constant_beyond_20(x: float) -> None:
    reference = torch.tensor([[-35.0]], dtype=torch.float64)
    for estimator in KlEstimator:
        theta = (reference + x).requires_grad_()
        penalty = kl_penalty(theta, reference, MASK[:1, :1], estimator)
        (slope,) = torch.autograd.grad(penalty.sum(), theta)
        held = min(max(x, -20.0), 20.0)
        exact = {K1: held, K2: held**2 / 2}.get(estimator, math.expm1(-held) + held)
        assert penalty.item() == pytest.approx(exact, rel=1e-9, abs=1e-9)
        assert estimator is K1 or penalty.item() >= -1e-15
        assert abs(x) <= 20.0 or slope.item() == 0.0


def test_k3_near_the_reference_is_exact_in_float32() -> None:
    reference = torch.tensor([[-1.0]])
    theta = reference + 2.0**-12
    x = float(theta - reference)
    penalty = kl_penalty(theta, reference, MASK[:1, :1], K3)
    assert float(penalty) == pytest.approx(math.expm1(-x) + x, rel=1e-3)


@every_estimator
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masked_places_change_no_bit(
    estimator: KlEstimator, garbage: float, dtype: torch.dtype
) -> None:
    def outcome(filler: float) -> list[Tensor]:
        theta, reference, mu = (
            torch.where(MASK, values.detach(), filler) for values in logprobs(5, dtype)
        )
        theta.requires_grad_()
        penalty = kl_penalty(theta, reference, MASK, estimator, log_importance=theta - mu)
        square = log_ratio_square(theta, mu, MASK)
        slopes = [torch.autograd.grad(each.sum(), theta)[0] for each in (penalty, square)]
        rewards = kl_token_rewards(mu, reference, MASK, coefficient=0.1)
        return [penalty, square, rewards, *slopes]

    for left, right in zip(outcome(0.0), outcome(garbage), strict=True):
        assert torch.equal(left, right)
        assert not right.detach()[~MASK].any()


def test_sixteen_bit_logprobs_are_widened_before_they_are_subtracted() -> None:
    theta, reference, _ = logprobs(6, torch.bfloat16)
    penalty = kl_penalty(theta, reference, MASK, K2)
    assert penalty.dtype == torch.float32
    wide = (theta.detach().float() - reference.float()).square() / 2 * MASK
    assert torch.equal(penalty.detach(), wide)


def test_no_gradient_reaches_the_reference_or_the_reward() -> None:
    theta, reference, mu = (values.detach().requires_grad_() for values in logprobs(8))
    penalty = kl_penalty(theta, reference, MASK, K3) + log_ratio_square(theta, mu, MASK)
    gradients = torch.autograd.grad(penalty.sum(), (theta, reference, mu), allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [True, False, False]
    assert not kl_token_rewards(theta, reference, MASK, coefficient=0.1).requires_grad


def test_missing_and_misshapen_references_are_named() -> None:
    theta, reference, mu = logprobs(9)
    with pytest.raises(InputError, match="reference_logprobs: missing, the KL penalty needs it"):
        kl_penalty(theta, None, MASK, K2)
    with pytest.raises(InputError, match="reference_logprobs: missing, the KL reward needs it"):
        kl_token_rewards(mu, None, MASK, coefficient=0.1)
    with pytest.raises(InputError, match=r"reference_logprobs: expected shape \[2, 3\], got"):
        kl_penalty(theta, reference[:1], MASK, K2)
    with pytest.raises(InputError, match=r"log_importance: expected shape \[2, 3\], got \[2, 1\]"):
        kl_penalty(theta, reference, MASK, K2, log_importance=reference[:, :1])
    with pytest.raises(InputError, match="reference_logprobs: expected a floating-point dtype"):
        kl_penalty(theta, reference.long(), MASK, K2)
    with pytest.raises(InputError, match=r"action_mask: expected dtype torch\.bool"):
        kl_penalty(theta, reference, MASK.long(), K2)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (math.nan, "1 non-finite values"),
        (-math.inf, "1 non-finite values"),
        (0.25, r"a logprob must be <= 0, got 0.25 at \[0, 0\]"),
    ],
)
def test_logprobs_that_are_none_are_named(value: float, rule: str) -> None:
    broken = torch.full((2, 3), -1.0, dtype=torch.float64)
    broken[0, 0] = value
    fine, masked = torch.full_like(broken, -1.0), torch.roll(MASK, 1, dims=1)
    calls: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda x: kl_penalty(x, fine, MASK, K2), "target_logprobs"),
        (lambda x: kl_penalty(fine, x, MASK, K2), "reference_logprobs"),
        (lambda x: log_ratio_square(x, fine, MASK), "target_logprobs"),
        (lambda x: log_ratio_square(fine, x, MASK), "behaviour_logprobs"),
        (lambda x: kl_token_rewards(x, fine, MASK, coefficient=1.0), "sampler_logprobs"),
        (lambda x: kl_token_rewards(fine, x, MASK, coefficient=1.0), "reference_logprobs"),
    ]
    for call, name in calls:
        with pytest.raises(InputError, match=f"^{name}: {rule}"):
            call(broken)
    assert not masked[0, 0]
    assert not kl_penalty(broken, fine, masked, K2).any()


def test_the_coefficient_goes_the_way_of_the_error_and_never_far() -> None:
    def adapt(measured: float) -> float:
        return adaptive_coefficient(0.2, measured, target=6.0, horizon=1000.0, n=100)

    assert adapt(6.0) == 0.2
    assert adapt(5.9) < 0.2 < adapt(6.1)
    assert adapt(100.0) == adapt(8.0) == pytest.approx(0.2 * 1.02)
    assert adapt(-1.0) == adapt(4.0) == pytest.approx(0.2 * 0.98)
    assert adaptive_coefficient(0.2, 100.0, target=6.0, horizon=1000.0, n=0) == 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measured_kl": math.nan}, "measured_kl nan must be finite"),
        ({"measured_kl": math.inf}, "measured_kl inf must be finite"),
        ({"coefficient": 0.0}, "coefficient 0.0 positive"),
        ({"coefficient": math.inf}, "coefficient inf positive"),
        ({"target": 0.0}, "target 0.0"),
        ({"horizon": 0.0}, "horizon 0.0"),
        ({"n": -1}, "n -1"),
        ({"n": 1001}, "n 1001"),
    ],
)
def test_an_adaptation_out_of_range_is_refused(changes: dict[str, float], message: str) -> None:
    given_ = {"coefficient": 0.2, "measured_kl": 6.0, "target": 6.0, "horizon": 1000.0, "n": 1}
    with pytest.raises(InputError, match=message):
        adaptive_coefficient(**(given_ | changes))  # type: ignore[arg-type]
