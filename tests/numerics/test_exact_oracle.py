"""Which correction is unbiased? Every expectation exactly, by enumeration, through our functions.

Two binary tokens and a tabular policy: four answers, whose expected ascent direction under mu is a
sum of four terms. theta's logits are z0, z1 after a 0, z1 after a 1. Sequence weights give the
true gradient; the others miss it by known numbers: a token ratio repairs the action and not the
states that it was taken in, a prefix product the states and not what follows, a suffix product
(V-trace) what follows and not the states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from correction.bounds import Bound, bound_weight
from correction.masks import masked_sum
from correction.ratios import Level, at_level, log_ratio
from correction.steps import StepUnit
from correction.surrogates import reinforce
from correction.vtrace import vtrace

INFINITY = float("inf")
ANSWERS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
REWARDS = torch.tensor([0.0, 1.0, 0.0, 3.0], dtype=torch.float64)
TARGET = torch.tensor([0.6, 0.3, 0.8], dtype=torch.float64)  # P(1): first, after 0, after 1
BEHAVIOUR = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
BASELINE = 0.98  # the value of mu
MASK = torch.ones(4, 2, dtype=torch.bool)
ONE_TURN = torch.zeros(4, 2, dtype=torch.int64)
TURN_A_TOKEN = torch.tensor([[0, 1]] * 4)
CRITIC = torch.tensor([[1.56, 0.3]] * 2 + [[1.56, 2.4]] * 2, dtype=torch.float64)  # of theta

TRUE_GRADIENT = [0.504, 0.084, 0.288]
SUFFIX = [0.504, 0.147, 0.144]

Estimator = Callable[[Tensor, Tensor], Tensor]
"""Token log ratios theta/mu [4, 2] and target logprobs [4, 2] -> losses [4, 2]."""


def logits_of(probabilities: Tensor) -> Tensor:
    return torch.logit(probabilities).requires_grad_()


def token_logprobs(logits: Tensor) -> Tensor:
    """Log probability of each token of each answer, [4, 2]."""
    of_second = logits[1:][ANSWERS[:, 0]]
    chosen = torch.stack([logits[0].expand(4), of_second], dim=1)
    sign = 2 * ANSWERS - 1
    return torch.nn.functional.logsigmoid(chosen * sign)


MU_LOGPROBS = token_logprobs(torch.logit(BEHAVIOUR))
MU = MU_LOGPROBS.sum(dim=1).exp()


def value(logits: Tensor) -> Tensor:
    """J, the expected reward."""
    return (token_logprobs(logits).sum(dim=1).exp() * REWARDS).sum()


@dataclass(frozen=True)
class Ascent:
    """Of -loss under mu: the expected gradient in the three logits and its trace of variance."""

    mean: Tensor
    variance: float


def ascent(estimator: Estimator) -> Ascent:
    """Exact moments over the four answers, each answer's gradient by autograd."""
    logits = logits_of(TARGET)
    target = token_logprobs(logits)
    logs = log_ratio(target.detach(), MU_LOGPROBS, MASK)
    losses = masked_sum(estimator(logs, target), MASK)
    gradients = torch.stack(
        [-torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in losses]
    )
    mean = (MU[:, None] * gradients).sum(dim=0)
    variance = (MU * (gradients - mean).square().sum(dim=1)).sum()
    return Ascent(mean, float(variance))


def weighted(
    level: Level,
    bound: Bound = Bound.NONE,
    high: float = 1.0,
    turns: Tensor = ONE_TURN,
    baseline: float = BASELINE,
) -> Estimator:
    """REINFORCE with a detached weight theta/mu."""

    def losses(logs: Tensor, target: Tensor) -> Tensor:
        advantages = (REWARDS - baseline)[:, None].expand(4, 2)
        raw = at_level(logs, MASK, level, turns)
        weight = bound_weight(raw, bound, low=0.0, high=high)
        return weight.weight * reinforce(target, advantages).losses

    return losses


def uncorrected(logs: Tensor, target: Tensor) -> Tensor:
    return weighted(Level.TOKEN)(torch.zeros_like(logs), target)


def prefix_product(logs: Tensor, target: Tensor) -> Tensor:
    return weighted(Level.TOKEN)(logs.cumsum(dim=1), target)


def suffix_product(logs: Tensor, target: Tensor) -> Tensor:
    return weighted(Level.TOKEN)(logs.flip(1).cumsum(dim=1).flip(1), target)


def v_trace(values: Tensor, bar: float, unit: StepUnit = StepUnit.TOKEN) -> Estimator:
    """The policy gradient of V-trace, its bars all the same; V is 0 after the end."""

    def losses(logs: Tensor, target: Tensor) -> Tensor:
        estimate = vtrace(
            logs,
            torch.stack([torch.zeros_like(REWARDS), REWARDS], dim=1),
            values,
            torch.zeros(4, dtype=torch.float64),
            MASK,
            ONE_TURN,
            gamma=1.0,
            unit=unit,
            rho_bar=bar,
            c_bar=bar,
            pg_rho_bar=bar,
            turn_level=Level.TURN_PRODUCT,
        )
        return reinforce(target, estimate.advantages).losses

    return losses


CONSTANT = torch.full((4, 2), BASELINE, dtype=torch.float64)
TABLE: dict[str, tuple[Estimator, list[float]]] = {
    "none": (uncorrected, [0.336, 0.1078, 0.1554]),
    "token": (weighted(Level.TOKEN), [0.384, 0.147, 0.144]),
    "token_truncated": (
        weighted(Level.TOKEN, Bound.TRUNCATE, 1.2),
        [0.27648, 0.12642, 0.144],
    ),
    "sequence": (weighted(Level.SEQUENCE_PRODUCT), TRUE_GRADIENT),
    "sequence_no_baseline": (weighted(Level.SEQUENCE_PRODUCT, baseline=0.0), TRUE_GRADIENT),
    "sequence_other_baseline": (weighted(Level.SEQUENCE_PRODUCT, baseline=-7.5), TRUE_GRADIENT),
    "sequence_truncated": (
        weighted(Level.SEQUENCE_PRODUCT, Bound.TRUNCATE, 1.2),
        [0.32448, 0.084, 0.18648],
    ),
    "geometric": (weighted(Level.GEOMETRIC), [0.39740806, 0.094905704, 0.209741694]),
    "turn_product_one_turn": (weighted(Level.TURN_PRODUCT), TRUE_GRADIENT),
    "turn_geometric_one_turn": (
        weighted(Level.TURN_GEOMETRIC),
        [0.39740806, 0.094905704, 0.209741694],
    ),
    "turn_product_of_tokens": (
        weighted(Level.TURN_PRODUCT, turns=TURN_A_TOKEN),
        [0.384, 0.147, 0.144],
    ),
    "turn_geometric_of_tokens": (
        weighted(Level.TURN_GEOMETRIC, turns=TURN_A_TOKEN),
        [0.384, 0.147, 0.144],
    ),
    "prefix": (prefix_product, [0.384, 0.084, 0.288]),
    "suffix": (suffix_product, SUFFIX),
    "v_trace_constant_unclipped": (v_trace(CONSTANT, INFINITY), SUFFIX),
    "v_trace_critic_unclipped": (v_trace(CRITIC, INFINITY), SUFFIX),
    "v_trace_critic": (v_trace(CRITIC, 1.0), [0.3816, 0.1344, 0.1404]),
    "v_trace_constant": (v_trace(CONSTANT, 1.0), [0.26232, 0.10584, 0.13188]),
    "v_trace_one_turn_unclipped": (v_trace(CONSTANT, INFINITY, StepUnit.TURN), TRUE_GRADIENT),
}
VARIANCES = {
    "none": 0.2432416,
    "token": 0.582127706,
    "sequence": 0.771093851,
    "suffix": 0.650636744,
    "v_trace_constant_unclipped": 0.650636744,
}
PRINTED_DIGITS = 6e-10


def close(expected: object, tolerance: float = PRINTED_DIGITS) -> object:
    return pytest.approx(expected, rel=0, abs=tolerance)


def test_the_problem_is_the_one_of_the_table() -> None:
    assert float(MU.sum()) == close(1.0, 1e-14)
    assert float((MU * REWARDS).sum()) == close(BASELINE, 1e-14)
    assert float(value(torch.logit(TARGET))) == close(1.56, 1e-14)
    theta = token_logprobs(torch.logit(TARGET)).exp()
    after_first = torch.stack([theta[1, 1] * 1.0, theta[3, 1] * 3.0])
    assert CRITIC[[0, 2], 1].tolist() == close(after_first.tolist(), 1e-14)
    assert float(theta[[0, 2], 0] @ after_first) == close(float(CRITIC[0, 0]), 1e-14)


def test_the_true_gradient_by_finite_differences_and_by_autograd() -> None:
    logits, step = torch.logit(TARGET), 1e-5
    differences = [
        float(value(logits + step * unit) - value(logits - step * unit)) / (2 * step)
        for unit in torch.eye(3, dtype=torch.float64)
    ]
    moving = logits_of(TARGET)
    (gradient,) = torch.autograd.grad(value(moving), moving)

    assert differences == close(TRUE_GRADIENT, 1e-9)
    assert gradient.tolist() == close(TRUE_GRADIENT, 1e-14)


@pytest.mark.parametrize("name", TABLE)
def test_expected_ascent_direction(name: str) -> None:
    estimator, expected = TABLE[name]
    assert ascent(estimator).mean.tolist() == close(expected)


@pytest.mark.parametrize("name", VARIANCES)
def test_variance_of_one_answer(name: str) -> None:
    assert ascent(TABLE[name][0]).variance == close(VARIANCES[name])


def test_only_whole_answers_as_units_are_unbiased() -> None:
    unbiased = {name for name, (_, mean) in TABLE.items() if mean == TRUE_GRADIENT}
    found = {
        name
        for name, (estimator, _) in TABLE.items()
        if ascent(estimator).mean.tolist() == close(TRUE_GRADIENT, 1e-12)
    }
    assert found == unbiased
    assert all("sequence" in name or "one_turn" in name for name in unbiased)


def test_on_policy_every_level_is_the_true_gradient_of_mu() -> None:
    moving = logits_of(BEHAVIOUR)
    (gradient,) = torch.autograd.grad(value(moving), moving)
    for name, (estimator, _) in TABLE.items():
        if "critic" in name:
            continue  # the critic is that of theta
        logits = logits_of(BEHAVIOUR)
        target = token_logprobs(logits)
        losses = masked_sum(estimator(target.detach() - MU_LOGPROBS, target), MASK)
        (found,) = torch.autograd.grad(-(MU * losses).sum(), logits)
        assert found.tolist() == close(gradient.tolist(), 1e-12), name


def score_direction(weights: Tensor) -> list[float]:
    """The same expectation without autograd: sum of mu w (R - b) (a - P(1)) of each logit."""
    total = [0.0, 0.0, 0.0]
    for answer, chance, reward, weight in zip(
        ANSWERS.tolist(), MU.tolist(), REWARDS.tolist(), weights.tolist(), strict=True
    ):
        for place, action in enumerate(answer):
            logit = 0 if place == 0 else 1 + answer[0]
            score = action - float(TARGET[logit])
            total[logit] += chance * weight[place] * (reward - BASELINE) * score
    return total


@pytest.mark.parametrize("level", [Level.TOKEN, Level.SEQUENCE_PRODUCT, Level.GEOMETRIC])
@pytest.mark.parametrize("high", [INFINITY, 1.2])
def test_autograd_agrees_with_the_score_function_written_out(level: Level, high: float) -> None:
    ratios = (token_logprobs(torch.logit(TARGET)) - MU_LOGPROBS).exp()
    product = ratios.prod(dim=1, keepdim=True).expand(4, 2)
    weights = {
        Level.TOKEN: ratios,
        Level.SEQUENCE_PRODUCT: product,
        Level.GEOMETRIC: product.sqrt(),
    }[level]

    found = ascent(weighted(level, Bound.TRUNCATE, high)).mean.tolist()

    assert found == close(score_direction(weights.clamp(max=high)), 1e-14)
