from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from correction.errors import InputError
from correction.shaping import mask_truncated, overlong_penalty


@given(
    lengths=st.lists(st.integers(0, 2000), min_size=1, max_size=8),
    max_tokens=st.integers(1, 1500),
    share=st.floats(0, 1),
)
def test_the_penalty_is_the_papers_three_cases(
    lengths: list[int], max_tokens: int, share: float
) -> None:
    cache = max(1, round(share * max_tokens))
    penalty = overlong_penalty(torch.tensor(lengths), max_tokens=max_tokens, cache_tokens=cache)
    for length, found in zip(lengths, penalty.tolist(), strict=True):
        if length <= max_tokens - cache:
            assert found == 0.0
        elif length <= max_tokens:
            assert found == ((max_tokens - cache) - length) / cache
        else:
            assert found == -1.0


def test_the_penalty_is_a_float64_that_rewards_can_take() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0])
    penalty = overlong_penalty(torch.tensor([4, 9, 30]), max_tokens=12, cache_tokens=6)
    assert penalty.dtype == torch.float64
    assert (rewards + penalty).tolist() == [1.0, 0.5, -1.0]


def test_a_truncated_trajectory_leaves_the_mask_as_a_whole() -> None:
    mask = torch.tensor([[True, True, False], [False, True, True], [True, False, False]])
    left = mask_truncated(mask, torch.tensor([False, True, False]))
    assert left.tolist() == [[True, True, False], [False] * 3, [True, False, False]]
    assert torch.equal(mask_truncated(mask, torch.zeros(3, dtype=torch.bool)), mask)


def test_nothing_may_be_left() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert not mask_truncated(mask, torch.ones(2, dtype=torch.bool)).any()
    assert mask.all()


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "cache_tokens", "message"),
    [
        (torch.tensor([1.0]), 8, 4, r"lengths_tokens: expected dtype torch\.int64"),
        (torch.tensor([[1]]), 8, 4, r"lengths_tokens: expected shape \[N\], got \[1, 1\]"),
        (torch.tensor([3, -1]), 8, 4, "lengths_tokens: must be >= 0, got -1"),
        (torch.tensor([1]), 8, 0, r"cache_tokens: must be in \[1, max_tokens = 8\], got 0"),
        (torch.tensor([1]), 8, 9, r"cache_tokens: must be in \[1, max_tokens = 8\], got 9"),
    ],
)
def test_bad_lengths_and_limits_are_named(
    lengths: Tensor, max_tokens: int, cache_tokens: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        overlong_penalty(lengths, max_tokens=max_tokens, cache_tokens=cache_tokens)


@pytest.mark.parametrize(
    ("mask", "truncated", "message"),
    [
        (torch.ones(2, 3), torch.ones(2).bool(), r"action_mask: expected dtype torch\.bool"),
        (torch.ones(2).bool(), torch.ones(2).bool(), r"action_mask: expected shape \[N, T\]"),
        (torch.ones(2, 3).bool(), torch.ones(2), r"truncated: expected dtype torch\.bool"),
        (torch.ones(2, 3).bool(), torch.ones(3).bool(), r"truncated: expected shape \[2\]"),
    ],
)
def test_bad_masks_are_named(mask: Tensor, truncated: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mask_truncated(mask, truncated)
