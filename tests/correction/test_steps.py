from __future__ import annotations

import pytest
import torch
from torch import Tensor

from correction.errors import InputError
from correction.steps import (
    Steps,
    StepUnit,
    find_steps,
    first_of_steps,
    give_to_tokens,
    next_of_steps,
    step_sizes,
    sum_of_steps,
)

MASK = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0]]).bool()
TURNS = torch.tensor([[-1, 0, 0, -1, 0, 2, 9], [5, 5, 5, 6, 0, 0, 0]])
VALUES = torch.tensor([[9.0, 1, 2, 9, 3, 4, 9], [9, 9, 9, 5, 9, 9, 9]])


def turns() -> Steps:
    return find_steps(MASK, TURNS, StepUnit.TURN)


def tokens() -> Steps:
    return find_steps(MASK, TURNS, StepUnit.TOKEN)


def test_tokens_are_packed_to_the_left_and_gaps_vanish() -> None:
    packed = first_of_steps(VALUES, tokens())

    assert packed.tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert give_to_tokens(packed, tokens()).tolist() == (VALUES * MASK).tolist()


def test_a_turn_is_told_by_its_id_across_a_gap_and_at_a_touch() -> None:
    """The first turn goes on behind the gap, and the second touches it."""
    assert sum_of_steps(VALUES, turns()).tolist() == [[6, 4], [5, 0]]
    assert first_of_steps(VALUES, turns()).tolist() == [[1, 4], [5, 0]]
    assert step_sizes(turns(), torch.float32).tolist() == [[3, 1], [1, 1]]
    broadcast = give_to_tokens(torch.tensor([[7.0, 8.0], [6.0, 99.0]]), turns())
    assert broadcast.tolist() == [[0, 7, 7, 0, 7, 8, 0], [0, 0, 0, 6, 0, 0, 0]]


def test_the_next_step_is_the_next_true_place_and_the_last_has_its_own() -> None:
    packed = first_of_steps(VALUES, tokens())

    after = next_of_steps(packed, torch.tensor([-1.0, -2.0]), tokens())

    assert after.tolist() == [[2, 3, 4, -1], [-2, 0, 0, 0]]


def test_a_padding_row_has_no_step_and_ignores_what_would_follow() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    steps = find_steps(mask, torch.zeros(2, 2, dtype=torch.int64), StepUnit.TURN)

    after = next_of_steps(torch.zeros(2, 1), torch.tensor([3.0, float("nan")]), steps)

    assert after.tolist() == [[3.0], [0.0]]
    assert steps.counts.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("turn_ids", "message"),
    [
        (
            torch.tensor([[0, 1, 0]]),
            r"turn_ids: must not decrease along a row, it does at \[0, 2\]",
        ),
        (torch.tensor([[0, 1, 3]]), r"turn_ids: must be in \[0, 3\) .* got 3 at \[0, 2\]"),
        (torch.tensor([[-1, 1, 1]]), "turn_ids: must be in"),
        (torch.tensor([[0, 1]]), r"turn_ids: expected shape \[1, 3\]"),
        (torch.tensor([[0.0, 1.0, 1.0]]), "turn_ids: expected dtype torch.int64"),
    ],
)
def test_turn_ids_that_break_their_rules(turn_ids: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_steps(torch.ones(1, 3, dtype=torch.bool), turn_ids, StepUnit.TURN)


def test_a_gap_does_not_hide_a_turn_that_goes_back() -> None:
    mask = torch.tensor([[True, False, True]])
    with pytest.raises(InputError, match="must not decrease"):
        find_steps(mask, torch.tensor([[2, 0, 1]]), StepUnit.TURN)


def test_turn_ids_are_not_looked_at_for_tokens() -> None:
    steps = find_steps(torch.ones(1, 3, dtype=torch.bool), torch.tensor([[9]]), StepUnit.TOKEN)
    assert steps.counts.tolist() == [3]
