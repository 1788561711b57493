"""The learner's engine on DeepSpeed; the only module that imports it.

Contract
    consumes    token tensors of one rank, a loss that is this rank's share of the global one
    produces    logprobs with a graph, optimiser steps, full weights by name
    waits for   the other ranks, in every method marked "all ranks"; never longer than timeout_s
    invariants  the gradient is that of the sum of the ranks' losses, for any world size and split;
                a step whose gradient is not finite changes nothing and says so

DeepSpeed averages gradients over ranks and divides a loss by its accumulation steps. The first is
undone here and the second is 1, because a loss arrives with the denominators of the global batch.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from correction.errors import InputError
from learner.batch import MicroBatch
from learner.critic import build_critic
from learner.forward import (
    ForwardNeeds,
    ForwardOutputs,
    PolicyForward,
    RawOutputs,
    forward_arguments,
)
from learner.optimiser import GuardedAdamW, parameter_groups, set_learning_rates
from learner.policy_model import likely_ids, load_policy
from learner.reference import ReferencePolicy
from learner.reports import StepOutcome
from learner.settings import LearnerSettings, RankPlace

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class DeepSpeedEngine:
    """A policy under ZeRO stage 0 to 3 on gloo or NCCL. One a process. All ranks construct it."""

    def __init__(self, settings: LearnerSettings, place: RankPlace, applied_steps: int = 0) -> None:
        self.settings = settings
        self.rank = place.rank
        self.world_size = place.world_size
        self.applied_steps = applied_steps
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        deepspeed = _start_process_group(place, settings.timeout_s)
        model = load_policy(settings)
        self.canary_ids = likely_ids(model, settings.seed)
        critic = build_critic(settings, model)
        groups = parameter_groups(model, settings.optimiser)
        if critic is not None:
            groups += parameter_groups(critic, settings.optimiser, settings.critic.learning_rate)
        self._optimiser = GuardedAdamW(
            groups,
            settings.optimiser,
            settings.optimiser.gradient_clip if settings.zero_stage == 0 else None,
        )
        self._engine, *_ = deepspeed.initialize(
            model=PolicyForward(model, critic),
            optimizer=self._optimiser,
            config=_configuration(settings, place.world_size),
            dist_init_required=False,
        )
        _limit_waiting(settings.timeout_s)
        self.device = torch.device(self._engine.device)
        self._reference = (
            ReferencePolicy(settings, settings.reference, self.device)
            if settings.reference is not None
            else None
        )

    @property
    def model(self) -> Any:  # noqa: ANN401
        """The transformers model in training; under ZeRO-3 its parameters are empty shells."""
        return self._engine.module.model

    def forward(self, micro: MicroBatch, needs: ForwardNeeds) -> ForwardOutputs:
        """What is needed of the target policy and the critic, with a graph. All ranks.

        Between two calls stands a `backward` of a loss that reaches the same outputs on every rank
        (`ForwardOutputs.zero_loss` on a rank that has none). Raises InputError as PolicyForward.
        """
        raw: RawOutputs = self._engine(**forward_arguments(micro, needs, self.device))
        return raw.on_cpu()

    def score(self, micro: MicroBatch, needs: ForwardNeeds) -> ForwardOutputs:
        """The same numbers as `forward` without a graph. All ranks."""
        with torch.no_grad():
            return self.forward(micro, needs)

    def reference(self, micro: MicroBatch, needs: ForwardNeeds) -> ForwardOutputs:
        """Logprobs and prompt logprobs of the frozen reference policy, without a graph.

        Raises InputError where the settings ask for no reference policy.
        """
        if self._reference is None:
            raise InputError("reference: no reference policy was loaded")
        return self._reference.score(micro, needs)

    def cross_entropy(self, token_ids: Tensor) -> tuple[Tensor, int]:
        """Summed -log theta of all tokens but the first of each row, with a graph; their number.

        token_ids: int64 [B, T] without padding. At temperature 1. All ranks.
        """
        logprobs = self._score_all(token_ids)
        return -logprobs.sum().cpu(), token_ids.numel() - len(token_ids)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of the global loss. All ranks."""
        self._engine.backward(loss * self.world_size)

    def step(self, rate_factor: float = 1.0) -> StepOutcome:
        """Reduce, clip and apply the accumulated gradient, or refuse it. All ranks.

        rate_factor: on the scheduled learning rates, of policy and critic alike.
        """
        rate = set_learning_rates(
            self._optimiser, self.settings.optimiser, self.applied_steps, rate_factor
        )
        self._engine.step()
        self._forget_gradients()
        applied = bool(self._engine.was_step_applied())
        self.applied_steps += applied
        return StepOutcome(applied, float(self._engine.get_global_grad_norm()), rate)

    def gather_over_ranks(self, values: Tensor) -> list[Tensor]:
        """The same-shaped tensor of every rank, in order of rank. All ranks."""
        if self.world_size == 1:
            return [values]
        mine = values.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, mine)
        return [part.cpu() for part in parts]

    def full_state(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, whole, on the CPU, under its state-dict name. All ranks, to the end.

        Rank 0 yields; the others take part and yield nothing. A tied weight comes once, under its
        first name, as transformers and vLLM load it. Values are rounded once: from the fp32
        masters where the training dtype is not the asked one. Tensors may share memory with the
        weights: use them before the next step.
        """
        wanted = TORCH_DTYPES[dtype]
        yield from self._whole(self.model, wanted)
        if self.rank == 0:
            yield from self._persistent_buffers(wanted)

    def _whole(self, module: Any, wanted: torch.dtype) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
        """Parameters as `full_state` gives them. All ranks, to the end."""
        for name, parameter in module.named_parameters():
            with self._gathered([parameter]):
                full = self._master(parameter) if parameter.dtype != wanted else parameter
                if self.rank == 0:
                    yield name, full.detach().to("cpu", wanted)

    def _persistent_buffers(self, wanted: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        model = self.model
        persistent = model.state_dict(keep_vars=True).keys()
        for name, buffer in model.named_buffers():
            if name in persistent and buffer.is_floating_point():
                yield name, buffer.detach().to("cpu", wanted)

    def score_ids(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs at temperature 1 of token_ids[1:], each given its prefix. All ranks."""
        with torch.no_grad():
            raw = self._score_all(torch.tensor([list(token_ids)], dtype=torch.int64))
        values: list[float] = raw[0, 1:].tolist()
        return values

    def close(self) -> None:
        """Leave the process group. Idempotent."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _forget_gradients(self) -> None:
        """Clear what ZeRO-3 keeps of the gradients of this step.

        It overwrites a gradient in the first backward pass of a step and adds in later ones. What
        the first pass does not reach, as pretraining text does not reach a critic, would otherwise
        be added to its gradient of the step before.
        """
        if self.settings.zero_stage == 3 and self._engine.module.critic is not None:
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()

    def _score_all(self, token_ids: Tensor) -> Tensor:
        """Logprobs [B, T] at temperature 1 of every token but the first of each row."""
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        mask[:, 0] = False
        arguments = (token_ids, mask, torch.ones(len(token_ids)))
        raw: RawOutputs = self._engine(*(argument.to(self.device) for argument in arguments))
        return raw.logprobs

    def _master(self, parameter: torch.nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        master: Tensor | None = safe_get_full_fp32_param(parameter)
        return parameter if master is None else master

    def _gathered(self, parameters: list[torch.nn.Parameter]) -> Any:  # noqa: ANN401
        if self.settings.zero_stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(parameters)


def _start_process_group(place: RankPlace, timeout_s: float) -> Any:  # noqa: ANN401
    """Import DeepSpeed and start the process group without its launcher, MPI or a compiler."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=place.address,
        MASTER_PORT=str(place.port),
    )
    import deepspeed
    import deepspeed.ops

    # A refused step is in our report, and its own start-up notes are a screenful a rank.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*torch.distributed.*deprecated", FutureWarning)

    # On a CPU the start of gloo would compile a C++ shared-memory collective: half a minute, a
    # compiler, and a stale lock that hangs every later start if the process is killed meanwhile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "nccl" if torch.cuda.is_available() else "gloo",
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=timeout_s),
        verbose=False,
    )
    return deepspeed


def _limit_waiting(timeout_s: float) -> None:
    """Put our timeout on the groups that DeepSpeed clones with torch's default of half an hour."""
    distributed = torch.distributed.distributed_c10d
    for group in list(distributed._world.pg_map):
        distributed._set_pg_timeout(timedelta(seconds=timeout_s), group)


def _configuration(settings: LearnerSettings, world_size: int) -> dict[str, Any]:
    guarded_by_zero = settings.zero_stage > 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": world_size,
        "gradient_accumulation_steps": 1,
        # step() is the boundary: the number of micro-batches differs from batch to batch.
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.optimiser.gradient_clip if guarded_by_zero else 0.0,
        "zero_optimization": {"stage": settings.zero_stage},
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
