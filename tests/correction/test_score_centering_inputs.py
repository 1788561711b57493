"""What Score Centering refuses, by the argument's name."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from correction.errors import InputError
from correction.score_centering import score_centered
from tests.correction.head_batches import NONE, Arguments, Rule, batch


@pytest.mark.parametrize("name", ["head_target_logprobs", "head_behaviour_logprobs"])
def test_a_missing_head_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: missing, Score Centering needs it"):
        score_centered(**batch() | {name: None}, **asdict(Rule(NONE)))


def with_first(name: str, value: float) -> Arguments:
    arguments = batch()
    values = arguments[name].detach().clone()
    values[(0,) * values.dim()] = value
    return arguments | {name: values}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (with_first("target_logprobs", math.nan), r"target_logprobs: 1 non-finite .* \[0, 0\]"),
        (with_first("behaviour_logprobs", -math.inf), "behaviour_logprobs: 1 non-finite"),
        (with_first("behaviour_logprobs", 0.5), "behaviour_logprobs: a logprob must be <= 0"),
        (with_first("head_target_logprobs", -math.inf), "head_target_logprobs: 1 non-finite"),
        (with_first("head_behaviour_logprobs", math.nan), r"head_behaviour_logprobs: 1 non-fin"),
        (with_first("head_behaviour_logprobs", 0.3), "head_behaviour_logprobs: a logprob must"),
        (with_first("head_behaviour_logprobs", -1e-9), "add up to 1"),
        (with_first("advantages", math.inf), "advantages: 1 non-finite"),
        (batch() | {"advantages": torch.zeros(2, 2)}, r"advantages: expected shape \[2, 3\]"),
        (batch() | {"mask": torch.zeros(2, 3, dtype=torch.bool)}, "action_mask: no place is true"),
        (
            batch() | {"head_behaviour_logprobs": torch.zeros(2, 3)},
            r"head_behaviour_logprobs: expected shape \[B, T, K\], got \[2, 3\]",
        ),
        (
            batch() | {"head_behaviour_logprobs": torch.zeros(2, 4, 4)},
            r"head_behaviour_logprobs: expected shape \[2, 3, 4\], got \[2, 4, 4\]",
        ),
        (
            batch() | {"head_target_logprobs": torch.zeros(2, 3, 5)},
            r"head_target_logprobs: expected shape \[2, 3, 4\], got \[2, 3, 5\]",
        ),
        (
            batch() | {"head_behaviour_logprobs": torch.zeros(2, 3, 4, dtype=torch.int64)},
            "head_behaviour_logprobs: expected a floating-point dtype",
        ),
    ],
)
def test_bad_input_is_named(arguments: Arguments, message: str) -> None:
    with pytest.raises(InputError, match=message):
        score_centered(**arguments, **asdict(Rule(NONE)))
