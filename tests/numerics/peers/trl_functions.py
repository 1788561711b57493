"""TRL's GRPO loss and its static functions, called without its trainer, accelerator and model.

`_compute_loss` is a method: it gets a stand-in for the object, which holds the settings that it
reads and returns our target logprobs where it would run the model. Evaluation mode: no gradient
accumulation.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.numerics.peers.peer_batches import MAX_TOKENS, PeerBatch
from tests.numerics.peers.peer_source import FOLDER, load


@cache
def functions() -> SimpleNamespace:
    """trl/trainer/grpo_trainer.py."""
    helpers = load(FOLDER / "trl/trainer/utils.py", {"nanmin", "nanmax"})
    names = {"_compute_loss", "get_off_policy_mask", "get_gamma_weights"}
    return load(FOLDER / "trl/trainer/grpo_trainer.py", names, vars(helpers))


def grpo_loss(
    batch: PeerBatch,
    target: Tensor,
    loss_type: str,
    *,
    level: str = "token",
    epsilons: tuple[float, float] = (0.2, 0.2),
    beta: float = 0.0,
    off_policy_threshold: float | None = None,
    weights: Tensor | None = None,
    **arguments: object,
) -> Tensor:
    """TRL's loss of one batch. arguments: of its config (`delta`, temperatures, ...)."""
    stand_in = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=epsilons[0],
        epsilon_high=epsilons[1],
        beta=beta,
        off_policy_mask_threshold=off_policy_threshold,
        max_completion_length=MAX_TOKENS,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        args=_arguments(**arguments),
        **_idle(target),
    )
    inputs = {
        "prompt_ids": torch.zeros(target.shape[0], 0),
        "prompt_mask": torch.zeros(target.shape[0], 0),
        "completion_ids": torch.zeros(target.shape),
        "completion_mask": batch.float_mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.proximal,
        "sampling_per_token_logps": batch.behaviour,
        "ref_per_token_logps": batch.reference,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss = functions()._compute_loss(stand_in, None, inputs)
    assert isinstance(loss, torch.Tensor)
    return loss


def _arguments(**changes: object) -> SimpleNamespace:
    """TRL's defaults of the config that the loss reads."""
    defaults: dict[str, object] = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    return SimpleNamespace(**defaults | changes)


def _idle(target: Tensor) -> dict[str, object]:
    """What the method touches and this comparison leaves off."""
    scored = (target, torch.zeros_like(target), None)
    return {
        "_get_per_token_logps_and_entropies": lambda *_, **__: scored,
        "get_off_policy_mask": functions().get_off_policy_mask,
        "get_gamma_weights": functions().get_gamma_weights,
        "top_entropy_quantile": 1.0,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "model": SimpleNamespace(training=False),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
        ),
    }
