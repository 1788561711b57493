"""The learner's step on real DeepSpeed processes, against other splits and against plain torch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from correction.batch_view import BatchView
from correction.objective import PolicyInputs, policy_objective, prepare
from correction.versions import PolicyVersion
from learner.batch import LearnerBatch, assemble, lag_versions, plan
from learner.optimiser import learning_rate_at, parameter_groups
from learner.rank import LearnerRank
from learner.settings import LearnerSettings, OptimiserSettings, RankPlace
from learner.step import StepReport
from tests.learner.learner_ranks import (
    Trained,
    made_up_groups,
    made_up_payloads,
    run_ranks,
    settings_for,
    train_cases,
    weights_of,
    write_tiny_model,
)

pytestmark = pytest.mark.stack

ADAM = OptimiserSettings(
    learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, gradient_clip=0.5, epsilon=1e-3
)
SAME_GRADIENT = 1e-6


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def cases(model_path: str, untied_path: str) -> dict[str, LearnerSettings]:
    stages = {f"stage {s}": settings_for(model_path, zero_stage=s) for s in range(4)}
    return stages | {
        "one row a micro-batch": settings_for(model_path, micro_batch_tokens=1),
        "one micro-batch": settings_for(model_path, micro_batch_tokens=10**6),
        "checkpointing": settings_for(model_path, gradient_checkpointing=True),
        "gspo": settings_for(model_path, "gspo", micro_batch_tokens=10**6),
        "gspo, one row a micro-batch": settings_for(model_path, "gspo", micro_batch_tokens=1),
        "adam 0": settings_for(model_path, optimiser=ADAM, zero_stage=0, max_reuse=3),
        "adam 1": settings_for(model_path, optimiser=ADAM, zero_stage=1, max_reuse=3),
        "untied": settings_for(untied_path, optimiser=ADAM, zero_stage=2, max_reuse=3),
    }


def _run(cases: dict[str, LearnerSettings], world_size: int) -> list[dict[str, Trained]]:
    results = run_ranks(train_cases, world_size, list(cases.values()), made_up_payloads())
    return [dict(zip(cases, of_rank, strict=True)) for of_rank in results]


@pytest.fixture(scope="module")
def alone(cases: dict[str, LearnerSettings]) -> dict[str, Trained]:
    return _run(cases, 1)[0]


@pytest.fixture(scope="module")
def together(cases: dict[str, LearnerSettings]) -> list[dict[str, Trained]]:
    return _run(cases, 2)


def difference(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("stage", ["stage 0", "stage 1", "stage 2", "stage 3"])
def test_two_ranks_give_the_same_gradient_as_one(
    alone: dict[str, Trained], together: list[dict[str, Trained]], stage: str
) -> None:
    assert np.linalg.norm(alone["stage 0"].change) > 1.0
    assert difference(together[0][stage].change, alone["stage 0"].change) < SAME_GRADIENT
    assert difference(alone[stage].change, alone["stage 0"].change) < SAME_GRADIENT


def test_reports_are_the_same_on_every_rank(together: list[dict[str, Trained]]) -> None:
    for case, first in together[0].items():
        second = together[1][case]
        for one, other in zip(first.reports, second.reports, strict=True):
            assert dataclasses.replace(one, phases_s={}) == dataclasses.replace(other, phases_s={})


def test_metrics_are_those_of_the_global_batch(
    alone: dict[str, Trained], together: list[dict[str, Trained]]
) -> None:
    one, two = (run["stage 1"].reports[0].metrics for run in (alone, together[0]))
    assert one.keys() == two.keys()
    for name in one:
        assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("split", ["one row a micro-batch", "one micro-batch", "checkpointing"])
def test_the_split_and_its_padding_do_not_change_the_gradient(
    alone: dict[str, Trained], split: str
) -> None:
    assert difference(alone[split].change, alone["stage 1"].change) < SAME_GRADIENT


def test_a_rank_with_a_filler_changes_nothing(
    alone: dict[str, Trained], together: list[dict[str, Trained]]
) -> None:
    layout = plan(assemble(made_up_groups()).lengths_tokens, 2, micro_batch_tokens=1)
    assert sum(not rows for mine in layout.ranks for rows in mine) == 1
    split = together[0]["one row a micro-batch"]
    assert difference(split.change, alone["stage 1"].change) < SAME_GRADIENT
    assert split.reports[0].loss == pytest.approx(alone["stage 1"].reports[0].loss, rel=1e-6)


def test_the_split_does_not_change_a_gradient_of_whole_sequences(
    alone: dict[str, Trained],
) -> None:
    one, other = alone["gspo"], alone["gspo, one row a micro-batch"]
    assert difference(one.change, other.change) < SAME_GRADIENT


@pytest.mark.parametrize("case", ["adam 0", "adam 1", "untied"])
def test_three_passes_equal_plain_torch(
    alone: dict[str, Trained], cases: dict[str, LearnerSettings], case: str
) -> None:
    norms, after = plain_torch(cases[case], assemble(made_up_groups()), first_step=3)
    trained = alone[case]
    assert [report.gradient_norm for report in trained.reports] == pytest.approx(norms, rel=1e-5)
    assert trained.after.keys() == after.keys()
    for name, expected in after.items():
        np.testing.assert_allclose(trained.after[name], expected, atol=1e-6, rtol=1e-5)


def test_each_applied_pass_moves_the_version_and_the_lag_by_one(
    alone: dict[str, Trained],
) -> None:
    reports = alone["adam 1"].reports
    assert [str(report.version) for report in reports] == ["0.4", "0.5", "0.6"]
    assert [report.reuse for report in reports] == [1, 2, 3]
    # Behaviour versions are 0 and 1, the learner begins at 3.
    assert [sorted(report.lag_tokens) for report in reports] == [[2, 3], [3, 4], [4, 5]]
    assert [report.lag_trajectories for report in reports] == [{3: 13}, {4: 13}, {5: 13}]
    assert all(sum(r.lag_tokens.values()) == r.action_tokens for r in reports)


def test_the_proximal_policy_is_the_one_before_the_first_pass(alone: dict[str, Trained]) -> None:
    first, second, _ = alone["adam 1"].reports
    assert first.metrics["log_ratio_update_abs_max"] == 0.0
    assert second.metrics["log_ratio_update_abs_max"] > 1e-4
    # prox/mu is measured against the same anchor in every pass.
    assert second.metrics["weight_mean_raw"] == pytest.approx(first.metrics["weight_mean_raw"])


def test_a_tied_head_travels_once_and_an_untied_one_as_itself(alone: dict[str, Trained]) -> None:
    assert "lm_head.weight" not in alone["stage 1"].after
    assert "lm_head.weight" in alone["untied"].after


def plain_torch(
    settings: LearnerSettings, batch: LearnerBatch, first_step: int
) -> tuple[list[float], dict[str, npt.NDArray[np.float32]]]:
    """The same passes without DeepSpeed: one padded batch, full logits, torch's AdamW and clip."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=torch.float32)
    optimiser = torch.optim.AdamW(
        parameter_groups(model, settings.optimiser),
        betas=settings.optimiser.betas,
        eps=settings.optimiser.epsilon,
    )
    norms: list[float] = []
    proximal = None
    for step in range(first_step, first_step + settings.max_reuse):
        target, loss = plain_loss(model, settings, batch, step, proximal)
        proximal = target.detach() if proximal is None else proximal
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        clip = settings.optimiser.gradient_clip
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        for group in optimiser.param_groups:
            group["lr"] = learning_rate_at(settings.optimiser, step)
        optimiser.step()
    return norms, {name: p.detach().numpy() for name, p in model.named_parameters()}


def plain_loss(
    model: Any,  # noqa: ANN401
    settings: LearnerSettings,
    batch: LearnerBatch,
    step: int,
    proximal: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    def padded(arrays: list[npt.NDArray[Any]], fill: float) -> torch.Tensor:
        tensors = [torch.from_numpy(array.copy()) for array in arrays]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)

    tokens = [row.tokens for row in batch.rows]
    ids = padded([t.token_ids for t in tokens], 0).long()
    mask = padded([t.action_mask for t in tokens], 0)
    real = torch.arange(ids.shape[1]) < torch.tensor(batch.lengths_tokens)[:, None]
    logits = model(input_ids=ids, attention_mask=real.long()).logits / 0.7
    table = torch.log_softmax(logits, dim=-1)[:, :-1]
    target = torch.nn.functional.pad(table.gather(2, ids[:, 1:, None])[..., 0], (1, 0))
    behaviour = padded([t.behaviour_logprobs for t in tokens], 0.0)
    turn_ids = padded([t.turn_ids for t in tokens], -1).long()
    inputs = PolicyInputs(
        target_logprobs=target,
        proximal_logprobs=target.detach() if proximal is None else proximal,
        behaviour_logprobs=behaviour,
        lag_versions=padded([lag_versions(row, step) for row in batch.rows], 0),
        turn_ids=turn_ids,
    )
    view = BatchView(
        rewards=batch.rewards,
        group_index=batch.group_index,
        action_mask=mask,
        turn_ids=turn_ids,
        behaviour_logprobs=behaviour,
        truncated=torch.zeros(len(batch.rows), dtype=torch.bool),
    )
    prepared = prepare(settings.recipe, view, limit_tokens=64)
    objective = policy_objective(settings.recipe, inputs, prepared, prepared.denominators(64))
    return target, objective.loss


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A batch that was spoilt on the last rank, then the same batch unspoilt."""

    refused: list[StepReport]
    kept: PolicyVersion
    unchanged: bool
    applied: list[StepReport]


def spoil_and_repeat(
    place: RankPlace, cases: list[LearnerSettings], payloads: list[bytes], what: str
) -> list[Refusal]:
    return [_spoil_and_repeat(place, settings, payloads, what) for settings in cases]


def _spoil_and_repeat(
    place: RankPlace, settings: LearnerSettings, payloads: list[bytes], what: str
) -> Refusal:
    """what: "backward", whose loss is spoilt, or "forward", whose logprobs are."""
    rank = LearnerRank(settings, place, PolicyVersion(0, 3))
    before = weights_of(rank)
    sound: Any = getattr(rank._engine, what)
    last = place.rank == place.world_size - 1

    def spoilt(argument: Any, *more: Any) -> Any:  # noqa: ANN401
        factor = math.nan if last else 1.0
        if what == "backward":
            return sound(argument * factor)
        outputs = sound(argument, *more)
        return dataclasses.replace(outputs, logprobs=outputs.logprobs * factor)

    setattr(rank._engine, what, spoilt)
    refused = rank.train(payloads, rank.version)
    kept = rank.version
    between = weights_of(rank)
    setattr(rank._engine, what, sound)
    applied = rank.train(payloads, rank.version)
    unchanged = all(np.array_equal(before[name], between[name]) for name in before)
    return Refusal(refused, kept, unchanged, applied)


@pytest.mark.parametrize("what", ["backward", "forward"])
def test_what_is_not_finite_on_one_rank_is_refused_on_all(model_path: str, what: str) -> None:
    warming_up = dataclasses.replace(ADAM, warmup_steps=10)
    cases = [
        settings_for(model_path, zero_stage=stage, optimiser=warming_up, max_reuse=2)
        for stage in (range(4) if what == "backward" else (1,))
    ]
    seen = [
        case
        for of_rank in run_ranks(spoil_and_repeat, 2, cases, made_up_payloads(), what)
        for case in of_rank
    ]
    assert len(seen) == 2 * len(cases)
    for case in seen:
        assert [report.applied for report in case.refused] == [False]
        assert not math.isfinite(case.refused[0].gradient_norm)
        assert str(case.refused[0].version) == str(case.kept) == "0.3"
        assert case.unchanged
        assert [str(report.version) for report in case.applied] == ["0.4", "0.5"]
        # The schedule moves with applied steps only.
        assert case.refused[0].learning_rate == pytest.approx(0.4e-3)
        assert [r.learning_rate for r in case.applied] == pytest.approx([0.4e-3, 0.5e-3])
