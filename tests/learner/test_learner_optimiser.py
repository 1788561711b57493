from __future__ import annotations

import pytest
import torch
from torch import Tensor

from correction.errors import ConfigError
from learner.optimiser import GuardedAdamW, learning_rate_at, parameter_groups
from learner.settings import LearnerSettings, OptimiserSettings, RankPlace
from tests.learner.learner_ranks import settings_for


def test_the_rate_warms_up_to_its_peak_and_stays() -> None:
    settings = OptimiserSettings(learning_rate=1.0, warmup_steps=4)
    rates = [learning_rate_at(settings, step) for step in range(7)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_the_rate_decays_to_zero_and_not_below() -> None:
    settings = OptimiserSettings(learning_rate=1.0, warmup_steps=1, decay_steps=5)
    rates = [learning_rate_at(settings, step) for step in range(7)]
    assert rates == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def _guarded(clip: float) -> tuple[GuardedAdamW, Tensor]:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    settings = OptimiserSettings(learning_rate=0.1)
    return GuardedAdamW([{"params": [parameter]}], settings, guard_clip=clip), parameter


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments(bad: float) -> None:
    optimiser, parameter = _guarded(1.0)
    parameter.grad = torch.tensor([0.1, bad])
    optimiser.step()
    assert optimiser.overflow
    assert parameter.tolist() == [1.0, 2.0]
    assert not optimiser.state


def test_the_norm_is_reported_before_clipping() -> None:
    optimiser, parameter = _guarded(1.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    optimiser.step()
    assert not optimiser.overflow
    assert optimiser._global_grad_norm == pytest.approx(5.0)
    assert float(parameter.grad.norm()) == pytest.approx(1.0, abs=1e-5)


def test_clip_zero_leaves_the_gradient_alone() -> None:
    optimiser, parameter = _guarded(0.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    optimiser.step()
    assert parameter.grad.tolist() == [3.0, 4.0]


def test_norms_and_biases_are_not_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    matrices, vectors = parameter_groups(model, OptimiserSettings(weight_decay=0.1))
    assert [p.shape for p in matrices["params"]] == [(3, 2)]
    assert matrices["weight_decay"] == 0.1
    assert [p.shape for p in vectors["params"]] == [(3,), (3,), (3,)]
    assert vectors["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"engine_dtype": "int8"}, "engine_dtype"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"zero_stage": 0, "dtype": "bfloat16"}, "zero_stage"),
        ({"max_reuse": 0}, "max_reuse"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, str | float], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        settings_for("anywhere", **changes)


def test_impossible_optimisers_and_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        OptimiserSettings(learning_rate=0.0)
    with pytest.raises(ConfigError, match="decay_steps"):
        OptimiserSettings(warmup_steps=5, decay_steps=5)
    with pytest.raises(ConfigError, match="rank"):
        RankPlace(rank=2, world_size=2)


def test_settings_are_frozen() -> None:
    assert isinstance(settings_for("anywhere"), LearnerSettings)
    with pytest.raises(AttributeError):
        settings_for("anywhere").max_reuse = 3  # type: ignore[misc]
