"""Every recipe through the learner's step: no split, and no second rank, changes its gradient."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from actors.trajectory.codec import encode_group
from actors.trajectory.record import EndReason
from correction.needs import Need
from correction.recipes import RECIPES, Recipe, resolve
from learner.settings import (
    CriticSettings,
    LearnerSettings,
    PretrainingSettings,
    ReferenceSettings,
)
from learner.starter_tokenizer import save_tokenizer
from tests.learner.learner_ranks import (
    GRADIENT_DESCENT,
    Trained,
    made_up_groups,
    run_ranks,
    settings_for,
    train_cases,
    write_tiny_model,
)

pytestmark = pytest.mark.stack

NOT_IN_A_BATCH = {Need.TEACHER, Need.SEGMENTS, Need.EXPERT, Need.HEAD}
"""What no trajectory of these tests holds."""
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "overlong filter": ("ppo_bypass", {"shaping": "overlong_filter"}),
    "prompts of filtered rows": (
        "erpo",
        {"shaping": "overlong_filter", "penalties.prompt_kl.coefficient": 1.0},
    ),
    "filtered vtrace": ("vtrace", {"shaping": "overlong_filter", "penalties.kl.place": "reward"}),
    "k1 in a recomputed reward": ("decoupled_ppo", {"penalties.kl.place": "reward"}),
    "adaptive kl": ("grpo", {"penalties.kl.target": 0.5, "penalties.kl.horizon": 100.0}),
    "current prompts": ("erpo", {"penalties.prompt_kl.weights": "current"}),
    "trust": ("tis", {"trust": ["veto", "m2", "kpop", "k3_limit"], "trust.k3_limit.limit": 0.5}),
    # The mu of these tests is far from theta: the paper's band would reject all of it.
    "geometric_rejection": (
        "geometric_rejection",
        {"trust.geometric_band": {"low": 0.8, "high": 1.3}},
    ),
    "critic model": ("impala", {}),
}
SAME_CHANGE = 2e-5
"""Two passes: the second starts from weights that a rounding, times ten gradients, has moved."""


def recipes() -> dict[str, Recipe]:
    named = {name: recipe for name, recipe in RECIPES.items() if not NOT_IN_A_BATCH & recipe.needs}
    varied = {
        label: resolve(name, overrides, max_lag_versions=4, group_size=4)
        for label, (name, overrides) in VARIANTS.items()
    }
    return named | varied


def payloads() -> list[bytes]:
    """Rewards of 0 and 1, as maxrl needs them; every third trajectory was cut."""
    groups = []
    for group in made_up_groups(seed=5):
        members = tuple(
            dataclasses.replace(
                trajectory,
                reward=float(member % 2),
                end_reason=EndReason.MAX_TOKENS if member % 3 == 2 else EndReason.DONE,
            )
            for member, trajectory in enumerate(group.trajectories)
        )
        groups.append(encode_group(dataclasses.replace(group, trajectories=members)))
    return groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tiny_model(folder)
    save_tokenizer(folder, 256)
    write_tiny_model(folder / "reference", seed=1)
    (folder / "text.txt").write_text("1234567\n\n" * 80, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def settings(folder: Path) -> dict[str, LearnerSettings]:
    made = {}
    for label, recipe in recipes().items():
        needs, extra = recipe.needs, dict[str, Any]()
        if Need.VALUES in needs:
            kind = "model" if label == "critic model" else "head"
            extra["critic"] = CriticSettings(kind=kind, learning_rate=1e7)
        if Need.REFERENCE in needs:
            extra["reference"] = ReferenceSettings(str(folder / "reference"))
        if Need.PRETRAINING in needs:
            extra["pretraining"] = PretrainingSettings(
                path=str(folder / "text.txt"), tokens_per_step=64, block_tokens=8
            )
        made[label] = settings_for(
            str(folder), recipe=recipe, optimiser=GRADIENT_DESCENT, max_reuse=2, **extra
        )
    return made


def _run(
    settings: dict[str, LearnerSettings], world_size: int, micro_batch_tokens: int
) -> list[dict[str, Trained]]:
    cases = [
        dataclasses.replace(case, micro_batch_tokens=micro_batch_tokens)
        for case in settings.values()
    ]
    results = run_ranks(train_cases, world_size, cases, payloads(), timeout_s=600.0)
    return [dict(zip(settings, of_rank, strict=True)) for of_rank in results]


@pytest.fixture(scope="module")
def whole(settings: dict[str, LearnerSettings]) -> dict[str, Trained]:
    return _run(settings, 1, 10**6)[0]


@pytest.fixture(scope="module")
def split(settings: dict[str, LearnerSettings]) -> list[dict[str, Trained]]:
    """Two ranks, one row a micro-batch; the batch's 13 rows leave one rank with a filler."""
    return _run(settings, 2, 1)


def difference(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("label", recipes())
def test_two_passes_are_the_same_for_any_split_and_move_the_policy(
    whole: dict[str, Trained], split: list[dict[str, Trained]], label: str
) -> None:
    assert np.linalg.norm(whole[label].change) > 0.0
    assert difference(split[0][label].change, whole[label].change) < SAME_CHANGE
    first, second = whole[label].reports, split[1][label].reports
    assert len(first) == len(second) == 2
    for one, other in zip(first, second, strict=True):
        assert one.applied
        assert one.metrics.keys() == other.metrics.keys()
        for name, value in one.metrics.items():
            assert math.isfinite(value), name
            assert other.metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-5), name


def test_the_control_of_vcpo_scales_the_learning_rate_by_the_effective_sample_size(
    whole: dict[str, Trained],
) -> None:
    for report in whole["vcpo"].reports:
        ess = report.metrics["ess_ratio_trajectory_raw"]
        assert 0.0 < ess < 0.95
        assert report.learning_rate == pytest.approx(
            GRADIENT_DESCENT.learning_rate * math.sqrt(ess), rel=1e-6
        )


def test_the_overlong_filter_counts_what_it_took_out(whole: dict[str, Trained]) -> None:
    (first, _) = whole["overlong filter"].reports
    assert 0.0 < first.metrics["overlong_filtered_fraction"] < 1.0
    assert first.metrics["tokens"] == pytest.approx(
        first.action_tokens * (1.0 - first.metrics["overlong_filtered_fraction"])
    )


def test_shares_of_the_loss_add_up_to_the_loss(whole: dict[str, Trained]) -> None:
    for label, trained in whole.items():
        for report in trained.reports:
            shares = [value for name, value in report.metrics.items() if name.startswith("loss_")]
            assert math.fsum(shares) == pytest.approx(report.loss, rel=1e-5, abs=1e-7), label


def test_instructgpt_trains_on_text_beside_the_trajectories(whole: dict[str, Trained]) -> None:
    report = whole["instructgpt"].reports[0]
    # An untrained model on a vocabulary of 64, times 27.8.
    assert report.metrics["loss_pretraining"] == pytest.approx(27.8 * math.log(64), rel=0.2)
    assert report.metrics["loss_critic"] > 0.0
