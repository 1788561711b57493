from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.score_centering import score_centered
from tests.correction.head_batches import (
    BAND,
    NONE,
    TRUNCATE,
    Arguments,
    Rule,
    batch,
    evaluate,
    every_rule,
    tensors,
)
from tests.numerics.golden_vectors import VECTORS

seeds = st.integers(0, 2**31)
quick = settings(max_examples=25, deadline=None)


def every_token(
    logits: Tensor, behaviour: Tensor, head: list[int], a: Tensor, rule: Rule
) -> Tensor:
    """Losses [V] of a place, had each token of the vocabulary been sampled there in turn."""
    size = len(behaviour)
    logprobs = logits.log_softmax(dim=-1)
    result = score_centered(
        logprobs[None],
        behaviour.log()[None],
        logprobs[head].expand(1, size, -1),
        behaviour.log()[head].expand(1, size, -1),
        a[None],
        torch.ones(1, size, dtype=torch.bool),
        **asdict(rule),
    )
    return result.token.losses[0]


def policies(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Logits of theta, with gradient, and probabilities of mu."""
    random = torch.Generator().manual_seed(seed)
    both = torch.randn(2, size, generator=random, dtype=torch.float64)
    return both[0].requires_grad_(), both[1].softmax(dim=-1)


@every_rule
@quick
@given(seed=seeds, a=st.floats(-3, 3))
def test_a_constant_advantage_has_a_mean_update_of_zero(rule: Rule, seed: int, a: float) -> None:
    logits, mu = policies(seed)
    losses = every_token(logits, mu, list(range(6)), torch.full_like(mu, a), rule)
    (update,) = torch.autograd.grad((mu * losses).sum(), logits)
    assert float(update.abs().max()) < 1e-12


@every_rule
@quick
@given(seed=seeds, rho=st.floats(0.2, 3.0))
def test_a_short_head_is_enough_where_the_tails_are_proportional(
    rule: Rule, seed: int, rho: float
) -> None:
    logits, mu = policies(seed)
    theta = logits.detach().softmax(dim=-1)
    head, tail = [0, 1, 2], [3, 4, 5]
    scale = min(rho, 0.9 / float(theta[tail].sum()))
    assume(min(abs(scale - edge) for edge in (0.5, 2.0)) > 1e-9)  # there a rounding decides
    mu[tail] = scale * theta[tail]
    mu[head] *= (1 - mu[tail].sum()) / mu[head].sum()

    losses = every_token(logits, mu, head, torch.ones_like(mu), rule)
    (update,) = torch.autograd.grad((mu * losses).sum(), logits)

    assert float(update.abs().max()) < 1e-12


@quick
@given(seed=seeds)
def test_with_the_whole_vocabulary_the_gradient_is_that_of_the_samplers_score(seed: int) -> None:
    logits, mu = policies(seed)
    a = torch.linspace(-2, 3, 6, dtype=torch.float64)
    losses = every_token(logits, mu, list(range(6)), a, Rule(NONE))
    for y in range(6):
        (gradient,) = torch.autograd.grad(losses[y], logits, retain_graph=True)
        chosen = torch.nn.functional.one_hot(torch.tensor(y), 6).double()
        torch.testing.assert_close(gradient, -a[y] * (chosen - mu), rtol=0, atol=1e-12)


def test_the_two_token_vector_uncentred_and_centred() -> None:
    vector = VECTORS["SC"]["two_vocab"]
    logits = torch.tensor(vector["p"], dtype=torch.float64).log().requires_grad_()
    mu = torch.tensor(vector["q"], dtype=torch.float64)

    (plain,) = torch.autograd.grad((mu * logits.log_softmax(dim=-1)).sum(), logits)
    losses = every_token(logits, mu, [0, 1], torch.ones_like(mu), Rule(NONE))
    (centred,) = torch.autograd.grad(-(mu * losses).sum(), logits)

    torch.testing.assert_close(plain.tolist(), vector["uncentred_mean_ascent"])
    torch.testing.assert_close(centred.tolist(), [0.0, 0.0], rtol=0, atol=1e-15)


def slow_token(arguments: Arguments, place: list[int], rule: Rule) -> Arguments:
    """Loss, slopes and tail ratio of one place from the definition, in plain floats."""
    i, t = place
    a = float(arguments["advantages"][i, t])
    log_theta = float(arguments["target_logprobs"].detach()[i, t])
    log_mu = float(arguments["behaviour_logprobs"][i, t])
    theta = [math.exp(log) for log in arguments["head_target_logprobs"][i, t].tolist()]
    mu = [math.exp(log) for log in arguments["head_behaviour_logprobs"][i, t].tolist()]
    rho = (1 - math.fsum(mu)) / (1 - math.fsum(theta))
    alpha = rho * rule(1 / rho)
    coefficients = [q * rule(p / q) - alpha * p for p, q in zip(theta, mu, strict=True)]
    drift = math.fsum(c * math.log(p) for c, p in zip(coefficients, theta, strict=True))
    weight = rule(math.exp(log_theta - log_mu))
    return {
        "loss": -a * (weight * log_theta - drift),
        "slope": -a * weight,
        "head_slopes": [a * c for c in coefficients],
        "tail_ratio": rho,
        "coefficient_l1": math.fsum(map(abs, coefficients)),
    }


@every_rule
@quick
@given(seed=seeds)
def test_value_and_gradient_are_those_of_the_formula(rule: Rule, seed: int) -> None:
    """The coefficients are detached, so the gradient is by formula and not by gradcheck."""
    arguments = batch(seed)
    result, target_gradient, head_gradient = evaluate(arguments, rule)
    found = {
        "loss": result.token.losses.detach(),
        "slope": target_gradient,
        "head_slopes": head_gradient,
        "tail_ratio": result.head.tail_ratio,
        "coefficient_l1": result.head.coefficient_l1,
    }
    for place in arguments["mask"].nonzero().tolist():
        for name, wanted in slow_token(arguments, place, rule).items():
            got = found[name][tuple(place)].tolist()
            assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12), (name, place)


@quick
@given(seed=seeds)
def test_the_untruncated_ratio_has_no_drift(seed: int) -> None:
    result, _, head_gradient = evaluate(batch(seed), Rule(TRUNCATE, high=math.inf))
    assert float(result.head.coefficient_l1.max()) < 1e-13
    assert float(head_gradient.abs().max()) < 1e-13


@every_rule
def test_on_policy_it_is_reinforce(rule: Rule) -> None:
    arguments = batch(4, equal=True)
    result, target_gradient, head_gradient = evaluate(arguments, rule)
    mask = arguments["mask"]
    plain = -arguments["advantages"] * arguments["target_logprobs"] * mask

    torch.testing.assert_close(result.token.losses, plain, rtol=0, atol=1e-13)
    assert torch.equal(target_gradient, -arguments["advantages"] * mask + 0.0)
    assert float(head_gradient.abs().max()) < 1e-13
    torch.testing.assert_close(result.head.tail_ratio, mask.double(), rtol=1e-12, atol=0)


@every_rule
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masked_places_change_no_bit(rule: Rule, garbage: float, dtype: torch.dtype) -> None:
    clean, dirty = batch(9), batch(9)
    mask = clean["mask"]
    for name in clean:
        if name == "mask":
            continue
        place = mask[..., None] if clean[name].dim() == 3 else mask
        for arguments, filler in ((clean, 0.0), (dirty, garbage)):
            values = torch.where(place, arguments[name].detach(), filler).to(dtype)
            arguments[name] = values.requires_grad_("target" in name)

    one, *gradients = evaluate(clean, rule)
    other, *dirty_gradients = evaluate(dirty, rule)

    outputs = (*tensors(other), *dirty_gradients)
    for left, right in zip((*tensors(one), *gradients), outputs, strict=True):
        assert torch.equal(left, right)
    assert not any(bool(values[~mask].any()) for values in outputs)


@every_rule
@pytest.mark.parametrize("garbage", [0.0, math.nan, -math.inf, 1e6])
def test_a_padding_entry_of_the_head_changes_no_bit(rule: Rule, garbage: float) -> None:
    arguments = batch(3)
    result, target_gradient, head_gradient = evaluate(arguments, rule)

    column = torch.full((2, 3, 1), garbage, dtype=torch.float64)
    padded = arguments | {
        "head_target_logprobs": torch.cat(
            [arguments["head_target_logprobs"].detach(), column], dim=-1
        ).requires_grad_(),
        "head_behaviour_logprobs": torch.cat(
            [arguments["head_behaviour_logprobs"], torch.full_like(column, -math.inf)], dim=-1
        ),
    }
    other, other_target, other_head = evaluate(padded, rule)

    for left, right in zip(tensors(result), tensors(other), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(target_gradient, other_target)
    assert torch.equal(head_gradient, other_head[..., :-1])
    assert not other_head[..., -1].any()


def test_a_head_of_nothing_but_padding_leaves_the_weighted_policy_gradient() -> None:
    arguments = batch(3)
    empty = torch.full_like(arguments["head_behaviour_logprobs"], -math.inf)
    result, target_gradient, head_gradient = evaluate(
        arguments | {"head_behaviour_logprobs": empty}, Rule(TRUNCATE)
    )
    ratio = (arguments["target_logprobs"] - arguments["behaviour_logprobs"]).detach().exp()
    wanted = -arguments["advantages"] * ratio.clamp(max=2.0) * arguments["mask"]
    torch.testing.assert_close(target_gradient, wanted)
    assert not head_gradient.any()
    assert not result.head.behaviour_mass.any()


def test_flags_say_where_the_bound_moved_the_weight() -> None:
    arguments = batch(0)
    ratios = torch.tensor([[0.4, 3.0, 9.0], [0.9, 0.1, 2.5]], dtype=torch.float64)
    arguments["target_logprobs"] = torch.full_like(ratios, -2.0).requires_grad_()
    arguments["behaviour_logprobs"] = -2.0 - ratios.log()
    low = {rule.weight: evaluate(arguments, rule)[0].token for rule in (Rule(BAND), Rule(TRUNCATE))}

    assert low[BAND].clipped_low.tolist() == [[True, False, False], [False] * 3]
    assert low[BAND].clipped_high.tolist() == [[False, True, False], [False, False, True]]
    assert not low[TRUNCATE].clipped_low.any()
    assert torch.equal(low[TRUNCATE].clipped_high, low[BAND].clipped_high)
    plain = evaluate(arguments, Rule(NONE))[0].token
    assert not (plain.clipped_low | plain.clipped_high | plain.clipped_dual).any()


@every_rule
def test_one_advantage_a_trajectory_spreads_over_its_tokens(rule: Rule) -> None:
    arguments = batch(6)
    column = arguments["advantages"][:, :1]
    one, *_ = evaluate(arguments | {"advantages": column}, rule)
    each, *_ = evaluate(arguments | {"advantages": column.expand(2, 3)}, rule)
    assert torch.equal(one.token.losses, each.token.losses)


@every_rule
@pytest.mark.parametrize("far", [-80.0, -1e6])
def test_policies_far_apart_stay_finite_in_float32(rule: Rule, far: float) -> None:
    arguments = batch(2)
    arguments["target_logprobs"] = torch.full((2, 3), far, requires_grad=True)
    arguments["behaviour_logprobs"] = torch.full((2, 3), -0.01)
    arguments["head_target_logprobs"] = torch.full((2, 3, 4), far, requires_grad=True)
    arguments["head_behaviour_logprobs"] = torch.tensor([-0.01, -20.0, -200.0, far]).expand(2, 3, 4)
    result, *gradients = evaluate(arguments, rule)
    for values in (*tensors(result), *gradients):
        assert torch.isfinite(values).all()
