"""What holds for every trust mask, on random batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correction.aggregation import Aggregation, aggregate, count_denominators
from tests.correction.trust_rules import (
    LOOSER,
    STRICTEST,
    USUAL,
    WHOLE_TRAJECTORIES,
    TrustBatch,
    make_trust_batch,
)

every_rule = pytest.mark.parametrize("rule", USUAL)
any_seed = st.integers(0, 2**31)
random_batches = given(
    seed=any_seed,
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    spread=st.sampled_from([1e-4, 0.3, 1.0, 4.0]),
)


def same(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype == torch.bool
    assert torch.equal(left, right)


@every_rule
def test_it_rejects_some_and_keeps_some(rule: str) -> None:
    masks = [(USUAL[rule](batch) | ~batch.mask) for batch in map(make_trust_batch, range(20))]
    share = float(torch.stack(masks).double().mean())
    assert 0.2 < share < 0.98


@every_rule
@settings(max_examples=40, deadline=None)
@random_batches
def test_on_policy_even_the_strictest_rule_keeps_all(
    rule: str, seed: int, rows: int, columns: int, spread: float
) -> None:
    batch = make_trust_batch(seed, rows, columns, spread).on_policy()
    for kept in (STRICTEST[rule](batch), STRICTEST[rule](batch.to(torch.float32))):
        assert bool(kept.all())


@every_rule
@settings(max_examples=40, deadline=None)
@random_batches
def test_masked_places_are_kept_and_trajectories_are_whole(
    rule: str, seed: int, rows: int, columns: int, spread: float
) -> None:
    batch = make_trust_batch(seed, rows, columns, spread)
    keep = USUAL[rule](batch)

    assert keep.shape == batch.mask.shape
    assert bool(keep[~batch.mask].all())
    if rule in WHOLE_TRAJECTORIES:
        for row, mask in zip(keep, batch.mask, strict=True):
            assert bool(row[mask].all()) or not bool(row[mask].any())


@every_rule
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
def test_garbage_at_masked_places_changes_nothing(rule: str, garbage: float) -> None:
    for seed in range(10):
        batch = make_trust_batch(seed)
        same(USUAL[rule](batch.with_garbage(garbage)), USUAL[rule](batch))


@every_rule
@settings(max_examples=40, deadline=None)
@given(seed=any_seed, order=st.permutations(range(5)), columns=st.integers(0, 3))
def test_order_and_padding_change_nothing(
    rule: str, seed: int, order: list[int], columns: int
) -> None:
    batch = make_trust_batch(seed, rows=5)
    keep = USUAL[rule](batch)

    moved = USUAL[rule](batch.rows(order).padded(columns))

    same(moved[:, columns : columns + 6], keep[torch.tensor(order)])


@pytest.mark.parametrize("rule", sorted(USUAL.keys() - {"second_moment"}))
@settings(max_examples=40, deadline=None)
@random_batches
def test_each_trajectory_alone_is_judged_as_in_the_batch(
    rule: str, seed: int, rows: int, columns: int, spread: float
) -> None:
    batch = make_trust_batch(seed, rows, columns, spread)
    keep = USUAL[rule](batch)
    for row in range(rows):
        alone = batch.rows([row])
        if bool(alone.mask.any()):
            same(USUAL[rule](alone)[0], keep[row])


@every_rule
@settings(max_examples=40, deadline=None)
@random_batches
def test_a_looser_limit_keeps_all_that_a_tighter_one_keeps(
    rule: str, seed: int, rows: int, columns: int, spread: float
) -> None:
    batch = make_trust_batch(seed, rows, columns, spread)
    assert not bool((USUAL[rule](batch) & ~LOOSER[rule](batch)).any())


@every_rule
@settings(max_examples=40, deadline=None)
@random_batches
def test_rejection_takes_gradients_away_and_leaves_the_rest_to_the_bit(
    rule: str, seed: int, rows: int, columns: int, spread: float
) -> None:
    batch = make_trust_batch(seed, rows, columns, spread)
    keep, counts = USUAL[rule](batch), count_denominators(batch.mask, max_tokens=8)

    def gradient(kept: Tensor) -> Tensor:
        target = batch.target.clone().requires_grad_()
        losses = -batch.advantages * target * kept
        loss = aggregate(losses, batch.mask, Aggregation.TOKEN_MEAN, counts)
        return torch.autograd.grad(loss, target)[0]

    everything = gradient(torch.ones_like(keep))
    assert torch.equal(gradient(keep), torch.where(keep, everything, 0.0))


@every_rule
def test_no_gradient_passes_and_no_argument_changes(rule: str) -> None:
    batch = make_trust_batch(3)
    before = batch.target.clone()
    moving = TrustBatch(
        batch.target.requires_grad_(), batch.behaviour, batch.advantages, batch.lag, batch.mask
    )

    assert not USUAL[rule](moving).requires_grad
    assert torch.equal(before, moving.target.detach())


@every_rule
def test_huge_finite_log_ratios_are_judged_without_a_nan(rule: str) -> None:
    """The far row is dropped by every rule that looks at ratios, the near row by none."""
    near, far = [-1.0, -2.0], [-1e6, -1e5]
    batch = TrustBatch(
        target=torch.tensor([near, far], dtype=torch.float64),
        behaviour=torch.tensor([near, near], dtype=torch.float64),
        advantages=torch.full((2, 2), -1.0, dtype=torch.float64),
        lag=torch.tensor([[0, 0], [9, 9]]),
        mask=torch.ones(2, 2, dtype=torch.bool),
    )
    for each in (batch, batch.to(torch.float32)):
        assert USUAL[rule](each).tolist() == [[True, True], [False, False]]
