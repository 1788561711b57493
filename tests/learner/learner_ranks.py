"""Real learner ranks in processes of their own, tiny models and made-up trajectories for them."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from actors.trajectory.codec import encode_group
from actors.trajectory.record import (
    EndReason,
    SamplingParameters,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionRun,
)
from actors.weight_packing import unpack
from correction.recipes import resolve
from correction.versions import PolicyVersion
from learner.rank import GatheredWeights, LearnerRank
from learner.settings import LearnerSettings, OptimiserSettings, RankPlace
from learner.step import StepReport

RUN_ID = "run-under-test"
VOCABULARY = 64
Result = TypeVar("Result")
Weights = dict[str, npt.NDArray[np.float32]]

# With an epsilon far above every gradient AdamW is gradient descent, so the change of the weights
# is the gradient, times 10.
GRADIENT_DESCENT = OptimiserSettings(learning_rate=1e7, epsilon=1e6, gradient_clip=0.0)


def write_tiny_model(folder: Path, *, tied: bool = True, seed: int = 0) -> str:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def made_up_group(number: int, rng: np.random.Generator, *, members: int = 4) -> TrajectoryGroup:
    """Two turns each, unequal lengths, behaviour versions 0 and 1."""
    trajectories = tuple(
        Trajectory(
            trajectory_id=f"{number}-{member}",
            group_id=str(number),
            member=member,
            turns=(_turn(rng, PolicyVersion(0, 0)), _turn(rng, PolicyVersion(0, 1))),
            reward=float(rng.random()),
            reward_parts={},
            end_reason=EndReason.DONE,
            sampling=SamplingParameters(temperature=0.7),
        )
        for member in range(members)
    )
    return TrajectoryGroup(RUN_ID, str(number), "made_up", f"task-{number}", members, trajectories)


def _turn(rng: np.random.Generator, version: PolicyVersion) -> Turn:
    observed, sampled = int(rng.integers(1, 9)), int(rng.integers(1, 13))
    return Turn(
        observation_ids=rng.integers(0, VOCABULARY, observed).astype(np.int32),
        action_ids=rng.integers(0, VOCABULARY, sampled).astype(np.int32),
        behaviour_logprobs=-rng.uniform(3.0, 5.0, sampled).astype(np.float32),
        version_runs=(VersionRun(version, sampled),),
        finish="stop",
    )


def made_up_groups(seed: int = 0, count: int = 3) -> list[TrajectoryGroup]:
    print(f"made_up_groups seed {seed}")
    rng = np.random.default_rng(seed)
    # The first group is larger: an odd number of rows leaves one of two ranks with a filler.
    return [made_up_group(number, rng, members=5 if number == 0 else 4) for number in range(count)]


def made_up_payloads(seed: int = 0, count: int = 3) -> list[bytes]:
    return [encode_group(group) for group in made_up_groups(seed, count)]


def settings_for(
    model_path: str,
    recipe: str = "decoupled_ppo",
    /,
    **changes: Any,  # noqa: ANN401
) -> LearnerSettings:
    defaults: dict[str, Any] = {
        "recipe": resolve(recipe, {}, max_lag_versions=4, group_size=4),
        "max_trajectory_tokens": 64,
        "optimiser": GRADIENT_DESCENT,
        "micro_batch_tokens": 128,
        "timeout_s": 60.0,
    }
    return LearnerSettings(run_id=RUN_ID, model_path=model_path, **{**defaults, **changes})


@dataclass(frozen=True)
class Trained:
    """What one rank saw after training one batch: its reports and, on rank 0, all weights."""

    reports: list[StepReport]
    before: Weights
    after: Weights

    @property
    def change(self) -> npt.NDArray[np.float64]:
        parts = [(self.after[name] - self.before[name]).ravel() for name in self.after]
        whole: npt.NDArray[np.float64] = np.concatenate(parts).astype(np.float64)
        return whole


def train_cases(
    place: RankPlace, cases: Sequence[LearnerSettings], payloads: list[bytes]
) -> list[Trained]:
    """Train the same batch once for each of the settings, in one process after the other."""
    return [train_case(place, settings, payloads) for settings in cases]


def train_case(place: RankPlace, settings: LearnerSettings, payloads: list[bytes]) -> Trained:
    version = PolicyVersion(0, 3)
    rank = LearnerRank(settings, place, version)
    before = weights_of(rank)
    reports = rank.train(payloads, version)
    return Trained(reports, before, weights_of(rank))


def weights_of(rank: LearnerRank) -> Weights:
    gathered = rank.gather()
    return {} if gathered is None else unpacked(gathered)


def unpacked(gathered: GatheredWeights) -> Weights:
    """Copies in float32, which holds every value of a narrower dtype."""
    tensors = unpack(gathered.buckets, gathered.manifest.tensors)
    return {name: tensor.float().numpy().copy() for name, tensor in tensors.items()}


def run_ranks(
    job: Callable[..., Result], world_size: int, *arguments: object, timeout_s: float = 150.0
) -> list[Result]:
    """Run `job(place, *arguments)` in one new process a rank; results in order of rank.

    Raises AssertionError with the child's traceback where a rank failed or took too long; no
    process is left behind.
    """
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    started = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        place = RankPlace(rank, world_size, "127.0.0.1", port)
        process = context.Process(target=_child, args=(theirs, job, place, arguments))
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        return [_receive(ours, rank, timeout_s) for rank, (_, ours) in enumerate(started)]
    finally:
        for process, ours in started:
            process.join(timeout=5.0)
            process.kill()
            process.join()
            ours.close()


def _child(
    pipe: Connection, job: Callable[..., Any], place: RankPlace, arguments: tuple[Any, ...]
) -> None:
    try:
        pipe.send((True, job(place, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _receive(pipe: Connection, rank: int, timeout_s: float) -> Any:  # noqa: ANN401
    assert pipe.poll(timeout_s), f"rank {rank} did not answer within {timeout_s} s"
    worked, result = pipe.recv()
    assert worked, f"rank {rank} failed:\n{result}"
    return result


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
