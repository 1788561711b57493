"""No reference vector is forgotten: every name in the file is read by a test, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.numerics.golden_vectors import VECTORS

SOURCES = [
    path.read_text(encoding="utf-8")
    for path in sorted(Path(__file__).parents[1].rglob("*.py"))
    if path.name != Path(__file__).name
]

LOOPED = "a test reads every row of the vector"
BY_FORMAT = "its name is put together in a test"
BETWEEN = "a number on the way to one that is pinned"
WRONG = "what a wrong or another implementation gives"
WORDS = "words about the vector"
BRANCHING = "where a rollout branches: issue 6"
PIVOTS = "which states are worth a group of turns: issue 6"
MIXTURE = "how often the expert acts: issue 6"

UNREAD = {
    ("ADV.seed_group", "std_pop"): BETWEEN,
    ("ADV.seed_group", "std_unbiased"): BETWEEN,
    ("ADV.zero_variance_group", "note"): WORDS,
    ("ADV.tailrl", "golden"): LOOPED,
    ("ADV.tailrl", "pair"): LOOPED,
    ("ADV.tailrl", "shifted"): LOOPED,
    ("ADV.reinforce_pp_baseline", "centred"): BETWEEN,
    ("ADV.gae", "tool_gap"): WORDS,
    ("PPO.dual_clip", "cols"): WORDS,
    ("F.gspo_paper", "s"): BETWEEN,
    ("F.gspo_wide", "s"): BETWEEN,
    ("F.mismatch_prox_mu", "ppl_ratio_train_over_rollout"): "not reported: the KLs say it",
    ("VERL.k1_inversion", "bounds"): WORDS,
    ("VERL.k1_inversion", "verl_keep"): WRONG,
    ("IS.a3po", "linear"): WRONG,
    ("VTRACE.decay", "note"): WORDS,
    ("KL.expected_gradient_of_loss_wrt_logits", "k1_loss"): BY_FORMAT,
    ("KL.expected_gradient_of_loss_wrt_logits", "k3_loss"): BY_FORMAT,
    ("KL.expected_gradient_of_loss_wrt_logits", "forward_KL_grad"): "the row k3_loss, once more",
    ("AGG", "wrong_mean_of_micro_means"): WRONG,
    ("AGG", "wrong_dp_mean_of_means"): WRONG,
    ("ARPO", "V"): BRANCHING,
    ("ARPO", "H_init"): BRANCHING,
    ("ARPO", "alpha"): BRANCHING,
    ("ARPO", "beta"): BRANCHING,
    ("ARPO", "tau"): BRANCHING,
    ("ARPO", "cols"): BRANCHING,
    ("ARPO", "rows"): BRANCHING,
    ("PIVOT", "mean_var"): PIVOTS,
    ("PIVOT", "lambda_diff"): PIVOTS,
    ("PIVOT", "keep"): PIVOTS,
    ("SRPO", "r"): BETWEEN,
    ("SRPO", "mean"): BETWEEN,
    ("DAGGER", "beta_half"): MIXTURE,
    ("DAGGER", "indicator"): MIXTURE,
    ("ERPO", "mean"): BETWEEN,
}
"""Second-level names that no test reads by themselves, and why."""


def readers(name: str) -> list[str]:
    """Sources of the tests that name a vector."""
    return [source for source in SOURCES if f'"{name}"' in source]


@pytest.mark.parametrize("name", VECTORS)
def test_every_vector_is_read_by_a_test(name: str) -> None:
    assert readers(name)


@pytest.mark.parametrize("name", [name for name in VECTORS if isinstance(VECTORS[name], dict)])
def test_every_part_of_a_vector_is_read_or_says_why_not(name: str) -> None:
    sources = "\n".join(readers(name))
    unread = {part for part in VECTORS[name] if f'"{part}"' not in sources}
    assert unread <= {part for vector, part in UNREAD if vector == name}


def test_reasons_are_given_for_parts_that_exist() -> None:
    assert all(part in VECTORS[vector] for vector, part in UNREAD)
