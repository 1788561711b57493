"""What `learner.deepspeed_engine` takes for granted about DeepSpeed 0.19.8 and torch 2.13.

One test an assumption: an upgrade that breaks one says which. All probes run in one process.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from learner.settings import RankPlace
from tests.learner.learner_ranks import run_ranks

pytestmark = pytest.mark.stack

TIMEOUT_S = 17.0


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    extensions = tmp_path_factory.mktemp("extensions")
    (probes,) = run_ranks(probe, 1, str(extensions))
    return probes


def probe(place: RankPlace, extensions: str) -> dict[str, Any]:
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    import torch

    from learner import deepspeed_engine

    deepspeed = deepspeed_engine._start_process_group(place, TIMEOUT_S)
    from deepspeed.comm.torch import build_shm_op

    seen: dict[str, Any] = {
        "switch_is_kept": deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"],
        "shm_op": build_shm_op(),
        "gloo": torch.distributed.get_backend(),
        "compiled": [str(path) for path in Path(extensions).rglob("*")],
    }
    for stage, dtype in ((0, "float32"), (1, "float32"), (2, "float32"), (1, "bfloat16")):
        seen[f"{stage} {dtype}"] = _probe_engine(deepspeed, stage, dtype)
    before = _timeouts()
    deepspeed_engine._limit_waiting(TIMEOUT_S)
    return seen | {"timeouts_before": before, "timeouts_after": _timeouts()}


def _timeouts() -> list[timedelta]:
    import torch

    device = torch.device("cpu")
    groups = list(torch.distributed.distributed_c10d._world.pg_map)
    return [group._get_backend(device).options._timeout for group in groups]


def _probe_engine(deepspeed: Any, stage: int, dtype: str) -> dict[str, Any]:  # noqa: ANN401
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    from learner.deepspeed_engine import _configuration
    from learner.optimiser import GuardedAdamW, parameter_groups
    from learner.settings import OptimiserSettings
    from tests.learner.learner_ranks import settings_for

    torch.manual_seed(0)
    settings = settings_for(
        "unused",
        zero_stage=stage,
        dtype=dtype,
        optimiser=OptimiserSettings(learning_rate=1e-2, gradient_clip=0.5),
    )
    model = torch.nn.Linear(3, 2).to(getattr(torch, dtype))
    optimiser = GuardedAdamW(
        parameter_groups(model, settings.optimiser),
        settings.optimiser,
        0.5 if stage == 0 else None,
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimiser,
        config=_configuration(settings, 1),
        dist_init_required=False,
    )
    data = torch.ones(1, 3, dtype=getattr(torch, dtype))
    report: dict[str, Any] = {}
    for _ in range(3):
        returned = engine.backward(engine(data).float().sum())
    report["loss_is_not_divided"] = float(returned) == float(engine(data).float().sum())
    engine.step()
    report["applied"] = engine.was_step_applied()
    report["norm"] = float(engine.get_global_grad_norm())
    master = safe_get_full_fp32_param(model.weight)
    report["has_master"] = master is not None
    if master is not None:
        report["rounded_once"] = torch.equal(master.to(model.weight.dtype), model.weight)
    before = model.weight.detach().clone()
    for group in optimiser.param_groups:
        group["lr"] = 0.0
    engine.backward(engine(data).float().sum())
    engine.step()
    report["rate_is_read_from_the_client_groups"] = torch.equal(before, model.weight)
    engine.backward(engine(data).float().sum() * float("nan"))
    engine.step()
    report["nan_applied"] = engine.was_step_applied()
    report["nan_changed"] = not torch.equal(before, model.weight)
    return report


KINDS = ["0 float32", "1 float32", "2 float32", "1 bfloat16"]


def test_the_shared_memory_op_can_be_switched_off(seen: dict[str, Any]) -> None:
    assert seen["switch_is_kept"] is False
    assert seen["shm_op"] is None


def test_gloo_starts_without_compiling_anything(seen: dict[str, Any]) -> None:
    assert seen["gloo"] == "gloo"
    assert seen["compiled"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_the_boundary_after_any_number_of_backward_passes(
    seen: dict[str, Any], kind: str
) -> None:
    assert seen[kind]["applied"] is True
    # Three passes, each with gradient 1 for 6 weights and 2 biases.
    assert seen[kind]["norm"] == pytest.approx(3 * 8**0.5, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_does_not_divide_the_loss(seen: dict[str, Any], kind: str) -> None:
    assert seen[kind]["loss_is_not_divided"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_learning_rate_is_read_from_the_client_optimisers_groups(
    seen: dict[str, Any], kind: str
) -> None:
    assert seen[kind]["rate_is_read_from_the_client_groups"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_is_not_applied_and_says_so(
    seen: dict[str, Any], kind: str
) -> None:
    assert seen[kind]["nan_applied"] is False
    assert seen[kind]["nan_changed"] is False


def test_only_zero_stages_keep_masters_and_weights_are_their_rounding(
    seen: dict[str, Any],
) -> None:
    assert [seen[kind]["has_master"] for kind in KINDS] == [False, True, True, True]
    assert all(seen[kind]["rounded_once"] for kind in KINDS[1:])


def test_the_time_limit_reaches_the_groups_that_deepspeed_clones(seen: dict[str, Any]) -> None:
    limit = timedelta(seconds=TIMEOUT_S)
    assert len(seen["timeouts_before"]) >= 2
    assert any(timeout != limit for timeout in seen["timeouts_before"])
    assert set(seen["timeouts_after"]) == {limit}
