from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from learner import logprobs as module
from learner.logprobs import RowScores, score_rows

TEMPERATURE = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.0, 3.0], dtype=torch.float64)
# Padding, a head that holds the row's own id, and one id twice.
HEAD_IDS = torch.tensor([[0, 3], [6, -1], [-1, -1], [3, 3], [2, 5], [5, 0]])
IDS = torch.tensor([0, 6, 3, 3, 1, 5])


def logits_of(rows: int = 6, vocabulary: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, vocabulary, dtype=dtype, generator=generator)


def score(logits: Tensor) -> RowScores:
    return score_rows(logits, IDS, TEMPERATURE, entropy=True, head_ids=HEAD_IDS)


def by_the_book(logits: Tensor) -> RowScores:
    table = torch.log_softmax(logits / TEMPERATURE[:, None], dim=-1)
    entropy = -(table.exp() * table).sum(dim=-1)
    head = table.gather(1, HEAD_IDS.clamp(min=0)).masked_fill(HEAD_IDS < 0, 0.0)
    return RowScores(table.gather(1, IDS[:, None])[:, 0], entropy, head)


def test_every_score_is_that_of_the_plain_softmax() -> None:
    for one, other in zip(score(logits_of()), by_the_book(logits_of()), strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_nothing_is_scored_that_was_not_asked_for() -> None:
    scores = score_rows(logits_of(), IDS, torch.ones(6))
    assert scores.entropy is None
    assert scores.head_logprobs is None


@pytest.mark.parametrize(
    "part",
    [
        lambda scores: scores.logprobs,
        lambda scores: scores.entropy,
        lambda scores: scores.head_logprobs,
        lambda scores: (
            scores.logprobs * scores.entropy.sin() + scores.head_logprobs.cos().sum(dim=-1)
        ),
    ],
    ids=["logprobs", "entropy", "head", "all of them"],
)
def test_the_gradient_is_exact(part: Callable[[RowScores], Tensor]) -> None:
    leaf = logits_of().requires_grad_()
    assert torch.autograd.gradcheck(lambda given: part(score(given)), (leaf,))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        leaf = logits_of(dtype=torch.float32).requires_grad_()
        parts = [part for part in score(leaf) if part is not None]
        loss = torch.stack([part.sin().sum() for part in parts]).sum()
        return [*(part.detach() for part in parts), *torch.autograd.grad(loss, leaf)]

    whole = run()
    assert len(whole) == 4
    for elements in (1, 7, 14, 35, 41):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
        for one, other in zip(run(), whole, strict=True):
            assert torch.equal(one, other)


def test_more_scores_do_not_change_the_logprobs() -> None:
    alone = score_rows(logits_of(), IDS, TEMPERATURE)
    assert torch.equal(alone.logprobs, score(logits_of()).logprobs)


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = (4 * torch.randn(5, 1000, generator=torch.Generator().manual_seed(5))).bfloat16()
    ids = torch.arange(5)
    result = score_rows(logits, ids, torch.ones(5), entropy=True, head_ids=ids[:, None])
    table = torch.log_softmax(logits.double(), dim=-1)
    entropy = -(table.exp() * table).sum(dim=-1)
    for found, expected in zip(
        result, (table[ids, ids], entropy, table[ids, ids][:, None]), strict=True
    ):
        assert found is not None
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_a_logit_of_minus_infinity_has_no_part_in_the_entropy() -> None:
    kept = logits_of(vocabulary=4)
    without = kept.clone().requires_grad_()
    holed = torch.cat((kept, torch.full((6, 3), -torch.inf, dtype=torch.float64)), dim=1)
    holed.requires_grad_()
    ids, temperature = torch.zeros(6, dtype=torch.int64), torch.full((6,), 0.01).double()
    entropies = []
    for logits in (without, holed):
        entropy = score_rows(logits, ids, temperature, entropy=True).entropy
        assert entropy is not None
        torch.autograd.backward(100.0 * entropy.sum())
        entropies.append(entropy)
    assert torch.equal(entropies[0], entropies[1])
    assert without.grad is not None
    assert holed.grad is not None
    assert torch.equal(holed.grad[:, :4], without.grad)
    assert not holed.grad[:, 4:].any()


def test_no_copy_of_the_logits_is_kept_for_the_backward_pass() -> None:
    leaf = logits_of(64, 1000, torch.float32).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor,  # type: ignore[func-returns-value]
        lambda tensor: tensor,
    ):
        ids = torch.zeros(64, dtype=torch.int64)
        score_rows(leaf, ids, torch.ones(64), entropy=True, head_ids=ids[:, None])
    large = [tensor for tensor in kept if tensor.numel() >= leaf.numel()]
    assert [tensor.data_ptr() for tensor in large] == [leaf.data_ptr()]
