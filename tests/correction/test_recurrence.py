from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from correction.recurrence import reverse_recurrence


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensor operations: what a loop over tokens would show."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.count += 1
        return func(*args, **(kwargs or {}))


def slow(coefficients: Tensor, terms: Tensor) -> Tensor:
    out = [[0.0] * terms.shape[1] for _ in terms]
    for row, (a, b) in enumerate(zip(coefficients.tolist(), terms.tolist(), strict=True)):
        following = 0.0
        for t in reversed(range(len(b))):
            following = out[row][t] = b[t] + a[t] * following
    return torch.tensor(out, dtype=torch.float64)


def problem(seed: int, rows: int, columns: int, highest: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    coefficients = highest * torch.rand(shape, generator=generator, dtype=torch.float64)
    coefficients[torch.rand(shape, generator=generator) < 0.1] = 0.0
    return coefficients, torch.randn(shape, generator=generator, dtype=torch.float64)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 4),
    columns=st.integers(1, 70),
    highest=st.sampled_from([0.5, 1.0, 1.5, 20.0]),
)
def test_it_equals_the_loop(seed: int, rows: int, columns: int, highest: float) -> None:
    coefficients, terms = problem(seed, rows, columns, highest)
    wanted = slow(coefficients, terms)
    # What a sum loses to rounding is measured by the sum of its terms' sizes.
    size = slow(coefficients, terms.abs())

    error = (reverse_recurrence(coefficients, terms) - wanted).abs()

    assert bool((error <= 1e-12 * (1 + size)).all())


@pytest.mark.parametrize("columns", [1, 2, 3, 64, 4095, 4096, 4097])
@pytest.mark.parametrize("coefficient", [0.0, 0.95, 1.0])
def test_long_rows_in_float32(columns: int, coefficient: float) -> None:
    terms = problem(1, 3, columns)[1].float()
    coefficients = torch.full_like(terms, coefficient)
    wanted = slow(coefficients, terms)

    solved = reverse_recurrence(coefficients, terms)

    assert solved.dtype == torch.float32
    size = slow(coefficients, terms.abs())
    assert bool(((solved - wanted).abs() <= 1e-6 * size).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("coefficient", [20.0, math.exp(20.0)])
def test_products_out_of_range_meet_zeros_and_stay_zero(
    dtype: torch.dtype, coefficient: float
) -> None:
    """20 to the 400th is no number of either dtype; nothing is learnt behind it all the same."""
    coefficients = torch.full((1, 401), coefficient, dtype=dtype)
    coefficients[0, 400] = 0.0
    terms = torch.zeros(1, 401, dtype=dtype)
    terms[0, 7] = 1.0

    solved = reverse_recurrence(coefficients, terms)

    assert solved[0, 7] == 1.0
    assert bool((solved[0, 8:] == 0).all())
    torch.testing.assert_close(float(solved[0, 6]), coefficient, rtol=1e-6, atol=0.0)


def test_float32_rows_of_large_and_small_coefficients_do_not_lose_their_product() -> None:
    """1e-20^3 is 0 and 1e20^3 infinite in float32; together they are 1."""
    coefficients = torch.tensor([[1e-20] * 3 + [1e20] * 3 + [0.0]])
    terms = torch.tensor([[0.0] * 6 + [1.0]])

    solved = reverse_recurrence(coefficients, terms)

    assert float(solved[0, 0]) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("columns", [5, 8, 31])
@pytest.mark.parametrize("padding", [1, 2, 9])
def test_padding_on_the_right_and_other_rows_change_no_bit(columns: int, padding: int) -> None:
    coefficients, terms = problem(3, 4, columns)
    wide = torch.nn.functional.pad(coefficients, (0, padding), value=1.0)

    solved = reverse_recurrence(wide, torch.nn.functional.pad(terms, (0, padding)))

    assert torch.equal(solved[:, :columns], reverse_recurrence(coefficients, terms))
    backwards = torch.tensor([3, 2, 1, 0])
    assert torch.equal(
        reverse_recurrence(wide, solved)[backwards],
        reverse_recurrence(wide[backwards], solved[backwards]),
    )


def test_arguments_are_not_written_to() -> None:
    coefficients, terms = problem(4, 2, 9)
    before = coefficients.clone(), terms.clone()

    reverse_recurrence(coefficients, terms)

    assert torch.equal(coefficients, before[0])
    assert torch.equal(terms, before[1])


def test_operations_grow_with_the_logarithm_of_the_length() -> None:
    counts = []
    for columns in (512, 1024, 2048, 4096):
        coefficients, terms = problem(5, 2, columns)
        with OperationCount() as operations:  # type: ignore[no-untyped-call]
            reverse_recurrence(coefficients, terms)
        counts.append(operations.count)
    growth = {later - earlier for earlier, later in pairwise(counts)}
    assert len(growth) == 1
    assert counts[-1] < 512
