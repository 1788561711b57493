"""Critic, reference policy and pretraining text on real DeepSpeed processes, beside plain torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from learner.batch import MicroBatch
from learner.critic import Critic, build_critic
from learner.deepspeed_engine import DeepSpeedEngine
from learner.forward import ForwardNeeds, ForwardOutputs
from learner.optimiser import parameter_groups
from learner.policy_model import load_policy
from learner.settings import (
    CriticSettings,
    LearnerSettings,
    OptimiserSettings,
    RankPlace,
    ReferenceSettings,
)
from tests.learner.learner_ranks import Weights, run_ranks, settings_for, write_tiny_model
from tests.learner.tiny_transformers import by_the_book, made_up_micro_batch

pytestmark = pytest.mark.stack

NEEDS = ForwardNeeds(entropy=True, prompt=True, head=True, values=True)
# With this epsilon and no momentum AdamW is gradient descent, at 0.01 times the gradient.
DESCENT = OptimiserSettings(
    learning_rate=1e4, epsilon=1e6, gradient_clip=0.0, betas=(0.0, 0.999), weight_decay=1e-6
)
CRITIC_RATE = 3e4
CASES = [f"{kind} {stage}" for kind in ("head", "model") for stage in range(4)] + ["detached 3"]
ALONE = ["model 0", "head 3"]
CHECKPOINTED = ["head 1", "model 3"]
# What each optimiser step trains on. The last two would show a gradient that stayed behind from
# the step before, in parameters that the first backward pass, or none, reaches.
SCHEDULE = (("rollouts", "text"), ("text", "rollouts"), ("text",))


def rows_of(rows: list[int]) -> MicroBatch:
    micro = made_up_micro_batch()
    cut: dict[str, Any] = {
        field.name: value[rows]
        for field in dataclasses.fields(micro)
        if isinstance(value := getattr(micro, field.name), Tensor)
    }
    return dataclasses.replace(micro, **cut)


def text_of(row: int) -> Tensor:
    return torch.randint(0, 32, (1, 11), generator=torch.Generator().manual_seed(row))


def shares(world_size: int) -> list[dict[str, list[Any]]]:
    """What each rank trains on: the same in all, whatever the world size."""
    micro_batches, texts = [rows_of([0, 2]), rows_of([1])], [text_of(0), text_of(1)]
    whole: list[dict[str, list[Any]]] = [
        {"rollouts": [micro], "text": [text]}
        for micro, text in zip(micro_batches, texts, strict=True)
    ]
    return whole if world_size == 2 else [{"rollouts": micro_batches, "text": texts}]


def loss_of(outputs: ForwardOutputs | dict[str, Tensor], micro: MicroBatch) -> Tensor:
    """Every entry of every output with a factor of its own, which no split changes."""
    total = torch.zeros(())
    if isinstance(outputs, ForwardOutputs):
        outputs = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    for tensor in outputs.values():
        factors = torch.sin(torch.arange(float(tensor[0].numel()))).view(tensor[0].shape) + 0.1
        rows = micro.row_index.view(-1, *[1] * (tensor.dim() - 1)) + 1.0
        total = total + (tensor * factors * rows).sum()
    return total


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one rank saw; the weights on rank 0 only."""

    policy: Weights
    critic: Weights
    first: dict[str, npt.NDArray[np.float32]]
    scored: dict[str, npt.NDArray[np.float32]]
    reference_before: dict[str, npt.NDArray[np.float32]]
    reference_after: dict[str, npt.NDArray[np.float32]]
    applied: list[bool]


def train_all(place: RankPlace, cases: list[LearnerSettings]) -> list[Seen]:
    return [train(place, settings) for settings in cases]


def train(place: RankPlace, settings: LearnerSettings) -> Seen:
    engine = DeepSpeedEngine(settings, place)
    share = shares(place.world_size)[place.rank]
    micro = share["rollouts"][0]
    scored = arrays(engine.score(micro, NEEDS))
    reference = arrays(engine.reference(micro, NEEDS))
    first, applied = None, []
    for kinds in SCHEDULE:
        for kind in kinds:
            for item in share[kind]:
                if kind == "text":
                    loss, count = engine.cross_entropy(item)
                    assert count == 10
                else:
                    outputs = engine.forward(item, NEEDS)
                    first = first or arrays(outputs)
                    loss = loss_of(outputs, item)
                engine.backward(loss)
                engine.score(micro, ForwardNeeds())  # in between, it must change nothing
        applied.append(engine.step().applied)
    return Seen(
        policy={name: tensor.numpy().copy() for name, tensor in engine.full_state("float32")},
        critic={
            name: tensor.numpy().copy()
            for name, tensor in engine._whole(engine._engine.module.critic, torch.float32)
        },
        first=first or {},
        scored=scored,
        reference_before=reference,
        reference_after=arrays(engine.reference(micro, NEEDS)),
        applied=applied,
    )


def arrays(outputs: ForwardOutputs) -> dict[str, npt.NDArray[np.float32]]:
    tensors = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    return {
        name: tensor.detach().numpy().copy()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def plain_torch(settings: LearnerSettings) -> tuple[Weights, Weights]:
    """The same steps in one process: full logits, torch's AdamW, no DeepSpeed."""
    model = load_policy(settings)
    critic = build_critic(settings, model)
    assert isinstance(critic, Critic)
    groups = [
        *[{**group, "lr": 1e4} for group in parameter_groups(model, DESCENT)],
        *[{**group, "lr": CRITIC_RATE} for group in parameter_groups(critic, DESCENT)],
    ]
    optimiser = torch.optim.AdamW(groups, betas=DESCENT.betas, eps=DESCENT.epsilon)
    (share,) = shares(1)
    for kinds in SCHEDULE:
        optimiser.zero_grad(set_to_none=False)
        for kind in kinds:
            for item in share[kind]:
                torch.autograd.backward(plain_loss(model, critic, item))
        optimiser.step()
    return named(model), named(critic)


def plain_loss(model: Any, critic: Critic, item: Any) -> Tensor:  # noqa: ANN401
    if isinstance(item, MicroBatch):
        return loss_of(by_the_book(model, critic, item), item)
    table = torch.log_softmax(model(input_ids=item).logits[:, :-1], dim=-1)
    return -table.gather(2, item[:, 1:, None]).sum()


def named(module: torch.nn.Module) -> Weights:
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LearnerSettings]:
    path = write_tiny_model(tmp_path_factory.mktemp("policy"))
    other = write_tiny_model(tmp_path_factory.mktemp("critic"), seed=1, tied=False)
    critics = {
        "head": CriticSettings(kind="head", learning_rate=CRITIC_RATE),
        "model": CriticSettings(kind="model", path=other, learning_rate=CRITIC_RATE),
        "detached": CriticSettings(kind="head", learning_rate=CRITIC_RATE, detach_trunk=True),
    }
    common: dict[str, Any] = {"optimiser": DESCENT, "reference": ReferenceSettings()}
    found = {
        case: settings_for(
            path,
            zero_stage=int(case[-1]),
            critic=critics[case[:-2]],
            gradient_checkpointing=case in CHECKPOINTED,
            **common,
        )
        for case in CASES
    }
    narrow = settings_for(path, zero_stage=2, dtype="bfloat16", critic=critics["head"], **common)
    return {**found, "bfloat16": narrow}


@pytest.fixture(scope="module")
def seen(cases: dict[str, LearnerSettings]) -> dict[int, list[dict[str, Seen]]]:
    """By world size, then by rank, then by case."""

    def run(world_size: int, chosen: list[str]) -> list[dict[str, Seen]]:
        results = run_ranks(train_all, world_size, [cases[case] for case in chosen])
        return [dict(zip(chosen, of_rank, strict=True)) for of_rank in results]

    return {1: run(1, ALONE), 2: run(2, list(cases))}


@pytest.mark.parametrize(
    ("case", "world_size"), [*[(case, 2) for case in CASES], *[(case, 1) for case in ALONE]]
)
def test_policy_and_critic_move_as_in_plain_torch(
    seen: dict[int, list[dict[str, Seen]]],
    cases: dict[str, LearnerSettings],
    case: str,
    world_size: int,
) -> None:
    policy, critic = plain_torch(cases[case])
    found = seen[world_size][0][case]
    assert found.applied == [True] * len(SCHEDULE)
    for expected, moved in ((policy, found.policy), (critic, found.critic)):
        assert moved.keys() == expected.keys()  # the policy's own names, nothing of the critic
        for name, tensor in expected.items():
            np.testing.assert_allclose(moved[name], tensor, atol=2e-6, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_scoring_gives_what_a_forward_pass_gives(
    seen: dict[int, list[dict[str, Seen]]], case: str
) -> None:
    for of_rank in seen[2]:
        found = of_rank[case]
        assert found.first.keys() == found.scored.keys()
        for name, values in found.first.items():
            np.testing.assert_array_equal(found.scored[name], values)
        assert not found.first["values"].any()  # a value head starts at 0


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_start_policy_and_stays(
    seen: dict[int, list[dict[str, Seen]]], case: str
) -> None:
    for of_rank in seen[2]:
        found = of_rank[case]
        assert found.reference_before.keys() == {"logprobs", "prompt_logprobs"}
        for name, values in found.reference_before.items():
            np.testing.assert_array_equal(found.reference_after[name], values)
            np.testing.assert_allclose(found.first[name], values, atol=1e-5)


def test_a_value_head_learns_in_bfloat16_and_speaks_in_float32(
    seen: dict[int, list[dict[str, Seen]]], cases: dict[str, LearnerSettings]
) -> None:
    found = seen[2][0]["bfloat16"]
    assert found.applied == [True] * len(SCHEDULE)
    assert found.first["values"].dtype == np.float32
    _, expected = plain_torch(cases["head 2"])
    moved, wanted = found.critic["head.weight"][0], expected["head.weight"][0]
    assert float(moved @ wanted) > 0.99 * float(np.linalg.norm(moved) * np.linalg.norm(wanted))
