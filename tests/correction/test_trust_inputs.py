"""Bad input to the trust masks: a typed error that names the argument and the rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from correction.errors import InputError
from correction.trust import (
    LagUnit,
    Reduction,
    dppo_kl,
    dppo_tv,
    geometric_band,
    k3_limit,
    kpop,
    opsm,
    second_moment,
    veto,
    within_lag,
)
from tests.correction.trust_rules import USUAL, TrustBatch, make_trust_batch

BATCH = make_trust_batch(0)
LOGS = BATCH.logs
PAIR = (BATCH.target, BATCH.behaviour)
SCORED = {"dppo_tv", "dppo_kl", "kpop"}
LATE = {"lag_token", "lag_trajectory"}
every_rule = pytest.mark.parametrize("rule", USUAL)


def at_an_action(values: Tensor, broken: float) -> Tensor:
    """`values` with one broken number, where the mask is true for sure."""
    changed = values.clone()
    changed[0, 0] = broken
    return changed


@every_rule
def test_a_mask_without_a_true_is_refused(rule: str) -> None:
    nothing = replace(BATCH, mask=torch.zeros_like(BATCH.mask))
    with pytest.raises(InputError, match="action_mask: no place is true"):
        USUAL[rule](nothing)


@every_rule
def test_a_mask_of_numbers_is_refused(rule: str) -> None:
    with pytest.raises(InputError, match=r"action_mask: expected dtype torch\.bool"):
        USUAL[rule](replace(BATCH, mask=BATCH.mask.double()))


@every_rule
def test_other_shapes_are_refused(rule: str) -> None:
    narrow = TrustBatch(
        BATCH.target[:, :-1], BATCH.behaviour[:, :-1], BATCH.advantages, BATCH.lag[:, :-1],
        BATCH.mask,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"expected shape \[4, 6\], got \[4, 5\]"):
        USUAL[rule](narrow)


@pytest.mark.parametrize("rule", sorted(USUAL.keys() - LATE))
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(rule: str, broken: float) -> None:
    name = "target_logprobs" if rule in SCORED else "log_ratios"
    with pytest.raises(InputError, match=f"{name}: 1 non-finite"):
        USUAL[rule](replace(BATCH, target=at_an_action(BATCH.target, broken)))


@pytest.mark.parametrize("rule", ["opsm", "dppo_tv", "dppo_kl"])
def test_advantages_that_are_not_finite_are_refused(rule: str) -> None:
    with pytest.raises(InputError, match="advantages: 1 non-finite"):
        USUAL[rule](replace(BATCH, advantages=at_an_action(BATCH.advantages, math.nan)))


@pytest.mark.parametrize("rule", sorted(SCORED))
@pytest.mark.parametrize("name", ["target", "behaviour"])
def test_a_probability_in_place_of_its_log_is_refused(rule: str, name: str) -> None:
    changed = replace(BATCH, **{name: at_an_action(getattr(BATCH, name), 0.5)})
    with pytest.raises(InputError, match=f"{name}_logprobs: a logprob must be <= 0, got 0.5"):
        USUAL[rule](changed)


@pytest.mark.parametrize("rule", sorted(LATE))
def test_a_version_from_the_future_is_refused(rule: str) -> None:
    ahead = BATCH.lag.clone()
    ahead[0, 0] = -1
    with pytest.raises(InputError, match="lag_versions: must be >= 0"):
        USUAL[rule](replace(BATCH, lag=ahead))
    with pytest.raises(InputError, match=r"lag_versions: expected dtype torch\.int64"):
        USUAL[rule](replace(BATCH, lag=BATCH.lag.double()))


@pytest.mark.parametrize(
    ("named", "call"),
    [
        (
            "max_lag_versions",
            lambda: within_lag(BATCH.lag, BATCH.mask, max_lag_versions=-1, unit=LagUnit.TOKEN),
        ),
        ("low", lambda: geometric_band(LOGS, BATCH.mask, low=1.1, high=2.0)),
        ("low", lambda: geometric_band(LOGS, BATCH.mask, low=-0.1, high=2.0)),
        ("high", lambda: geometric_band(LOGS, BATCH.mask, low=0.5, high=0.9)),
        ("high", lambda: geometric_band(LOGS, BATCH.mask, low=0.5, high=math.nan)),
        ("limit", lambda: k3_limit(LOGS, BATCH.mask, limit=-1.0, reduction=Reduction.MEAN)),
        ("low", lambda: veto(LOGS, BATCH.mask, low=1.5)),
        ("limit", lambda: opsm(LOGS, BATCH.advantages, BATCH.mask, limit=-0.5)),
        ("low", lambda: dppo_tv(*PAIR, BATCH.advantages, BATCH.mask, low=-0.1, high=0.2)),
        ("high", lambda: dppo_tv(*PAIR, BATCH.advantages, BATCH.mask, low=0.2, high=-0.1)),
        ("limit", lambda: dppo_kl(*PAIR, BATCH.advantages, BATCH.mask, limit=math.nan)),
        ("limit", lambda: kpop(*PAIR, BATCH.mask, limit=-2.0)),
        ("limit", lambda: second_moment(LOGS, BATCH.mask, limit=0.0)),
    ],
)
def test_a_parameter_that_would_reject_ratio_one_is_refused(
    named: str, call: Callable[[], Tensor]
) -> None:
    with pytest.raises(InputError, match=f"^{named}: expected"):
        call()
