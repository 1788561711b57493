from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.ratios import MAX_LOG_RATIO, Level, at_level, log_ratio, segment_sizes, to_ratio
from tests.correction.micro_batches import MicroBatch, make_batch

every_level = pytest.mark.parametrize("level", Level)
random_batches = given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    spread=st.sampled_from([1e-4, 0.3, 8.0]),
)


def level_of(batch: MicroBatch, level: Level) -> Tensor:
    logs = log_ratio(batch.target, batch.behaviour, batch.mask)
    return at_level(logs, batch.mask, level, batch.turns)


def slow_level(batch: MicroBatch, row: int, level: Level) -> list[float]:
    """Log ratio of each place, from lists; 0 where masked."""
    places = [t for t, true in enumerate(batch.mask[row].tolist()) if true]
    logs = {t: float(batch.target[row, t] - batch.behaviour[row, t]) for t in places}
    turns = batch.turns[row].tolist()
    result = [0.0] * len(turns)
    for t in places:
        unit = places
        if level is Level.TOKEN:
            unit = [t]
        elif level in (Level.TURN_PRODUCT, Level.TURN_GEOMETRIC):
            unit = [k for k in places if turns[k] == turns[t]]
        total = math.fsum(logs[k] for k in unit)
        mean = level in (Level.TURN_GEOMETRIC, Level.GEOMETRIC)
        result[t] = total / len(unit) if mean else total
    return result


@every_level
@settings(max_examples=80, deadline=None)
@random_batches
def test_a_level_is_its_slow_truth(
    level: Level, seed: int, rows: int, columns: int, spread: float
) -> None:
    batch = make_batch(seed, rows, columns, spread)
    slow = [slow_level(batch, row, level) for row in range(rows)]
    wanted = torch.tensor(slow, dtype=torch.float64)
    torch.testing.assert_close(level_of(batch, level), wanted, rtol=1e-12, atol=1e-12)


@every_level
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
def test_garbage_at_masked_places_changes_no_bit_of_value_and_gradient(
    level: Level, garbage: float
) -> None:
    for seed in range(5):
        batch = make_batch(seed)
        values, slopes = [], []
        for each in (batch, batch.with_garbage(garbage)):
            target = each.target.clone().requires_grad_()
            logs = log_ratio(target, each.behaviour, each.mask)
            ratios = to_ratio(at_level(logs, each.mask, level, each.turns))
            values.append(ratios.detach())
            slopes.append(torch.autograd.grad(ratios.sum(), target)[0])
        assert torch.equal(*values)
        assert torch.equal(*slopes)


@every_level
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e6])
def test_a_level_is_blind_to_masked_log_ratios(level: Level, garbage: float) -> None:
    batch = make_batch(4)
    logs = batch.target - batch.behaviour
    dirty = torch.where(batch.mask, logs, garbage)
    clean = at_level(logs, batch.mask, level, batch.turns)
    assert torch.equal(at_level(dirty, batch.mask, level, batch.turns), clean)
    assert not clean[~batch.mask].any()


@every_level
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    order=st.permutations(range(4)),
    columns=st.integers(0, 3),
)
def test_order_and_padding_change_nothing(
    level: Level, seed: int, order: list[int], columns: int
) -> None:
    batch = make_batch(seed)
    moved = level_of(batch.rows(order).padded(columns), level)
    torch.testing.assert_close(
        moved[:, columns : columns + 6],
        level_of(batch, level)[torch.tensor(order)],
        rtol=1e-12,
        atol=1e-12,
    )


@every_level
def test_equal_policies_give_a_ratio_of_one_to_the_bit(level: Level) -> None:
    for dtype in (torch.float64, torch.float32):
        batch = make_batch(1).to(dtype)
        logs = log_ratio(batch.target, batch.target, batch.mask)
        ratios = to_ratio(at_level(logs, batch.mask, level, batch.turns))
        assert torch.equal(ratios, torch.ones_like(batch.target))


@every_level
def test_an_answer_of_one_token_is_the_same_at_every_level(level: Level) -> None:
    batch = make_batch(2, rows=6, columns=1)
    torch.testing.assert_close(level_of(batch, level), level_of(batch, Level.TOKEN))


@settings(max_examples=40, deadline=None)
@random_batches
def test_one_turn_is_the_trajectory_and_a_turn_a_token_is_the_token(
    seed: int, rows: int, columns: int, spread: float
) -> None:
    batch = make_batch(seed, rows, columns, spread)
    logs = log_ratio(batch.target, batch.behaviour, batch.mask)
    one = torch.zeros_like(batch.turns)
    each = torch.arange(columns).expand(rows, columns)

    def same(turns: Tensor, of_turns: Level, other: Level) -> None:
        left = at_level(logs, batch.mask, of_turns, turns)
        right = at_level(logs, batch.mask, other, turns)
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)

    same(one, Level.TURN_PRODUCT, Level.SEQUENCE_PRODUCT)
    same(one, Level.TURN_GEOMETRIC, Level.GEOMETRIC)
    same(each, Level.TURN_PRODUCT, Level.TOKEN)
    same(each, Level.TURN_GEOMETRIC, Level.TOKEN)


@every_level
def test_a_unit_has_as_many_tokens_as_share_its_ratio(level: Level) -> None:
    mask = torch.tensor([[True, True, False, True, True], [False] * 5])
    turns = torch.tensor([[0, 0, 0, 0, 3], [0] * 5])
    sizes = segment_sizes(mask, level, turns, torch.float64)
    expected = {
        Level.TOKEN: [1.0] * 5,
        Level.TURN_PRODUCT: [3.0, 3.0, 1.0, 3.0, 1.0],
        Level.TURN_GEOMETRIC: [3.0, 3.0, 1.0, 3.0, 1.0],
        Level.SEQUENCE_PRODUCT: [4.0] * 5,
        Level.GEOMETRIC: [4.0] * 5,
    }
    assert sizes[0].tolist() == expected[level]
    assert sizes[1].tolist() == [1.0] * 5


def test_touching_turns_are_told_apart_by_their_ids() -> None:
    logs = torch.tensor([[0.5, -0.5, 1.0]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    product = at_level(logs, mask, Level.TURN_PRODUCT, torch.tensor([[0, 1, 1]]))
    assert product.tolist() == [[0.5, 0.5, 0.5]]


def test_sixteen_bits_are_widened_before_the_difference() -> None:
    """Near -8 bfloat16 has steps of 1/32: a difference taken in it would be 0 or a whole step."""
    upper = torch.tensor([[-8.0]], dtype=torch.float32)
    lower = torch.tensor([[-8.0625]], dtype=torch.bfloat16)
    mask = torch.ones(1, 1, dtype=torch.bool)
    difference = log_ratio(upper + 0.01, lower, mask)
    assert difference.dtype == torch.float32
    assert float(difference) == pytest.approx(0.0725, abs=1e-5)
    assert log_ratio(lower, lower, mask).dtype == torch.float32


def test_the_clamp_is_at_the_end_and_symmetric() -> None:
    logs = torch.tensor([[15.0, 15.0, -29.0]], dtype=torch.float64)
    mask, turns = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.int64)

    product = at_level(logs, mask, Level.SEQUENCE_PRODUCT, turns)

    assert to_ratio(product)[0].tolist() == pytest.approx([math.e] * 3)
    far = torch.tensor([1e6, -1e6, math.inf, -math.inf], dtype=torch.float64)
    assert to_ratio(far).log().tolist() == pytest.approx([MAX_LOG_RATIO, -MAX_LOG_RATIO] * 2)
    squared = to_ratio(torch.tensor(1e6)).square()
    assert torch.isfinite(squared)
