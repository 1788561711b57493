"""ERPO: a penalty on how the policy's view of the *prompts* moves (arXiv 2608.23311).

The environment is a distribution of prompts; P_theta(q) is the probability that the model itself
gives to prompt q. The penalty keeps it at that of the start model, ref:

    penalty   k3 = exp(-x) - 1 + x of each prompt token, x = log theta - log ref
    gradient  1 - exp(-x) in log theta: pushes x to 0 from either side
    weight    w(q) = clip(mean(s) / s(q), 0, 2), s(q) = - log P(q); multiplies the advantages

The paper takes s from the start model and clips at 2; its code takes s from the current model
over the global batch and does not clip. Both are here: the caller chooses what it passes. The
paper's coefficient of the penalty is 0.01.

Prompt tokens have no policy lag: nothing here is a ratio to mu.
"""

from __future__ import annotations

from torch import Tensor

from correction.checks import (
    require_finite,
    require_floating,
    require_given,
    require_logprobs,
    require_mask,
)
from correction.errors import InputError
from correction.penalties import KlEstimator, estimate_kl
from correction.ratios import MAX_LOG_RATIO, log_ratio


def prompt_kl(
    target_prompt_logprobs: Tensor | None,
    reference_prompt_logprobs: Tensor | None,
    prompt_mask: Tensor,
) -> Tensor:
    """k3 of each prompt token: [B, T] with gradient in the target, 0 where masked.

    target_prompt_logprobs, reference_prompt_logprobs: [B, T], logprobs of the prompt's own ids.
    prompt_mask: [B, T] bool, true on prompt tokens that have a logprob: never on the first one.

    The prompts come from a data set and not from theta, so the mean of this is no KL of anything;
    it is 0 exactly where both models agree. Log ratios are clamped to +-20. Raises InputError for
    missing tensors, shapes, dtypes, and logprobs that are not finite or above 0.
    """
    require_mask("prompt_mask", prompt_mask)
    target = require_given("target_prompt_logprobs", target_prompt_logprobs, "the prompt penalty")
    reference = require_given(
        "reference_prompt_logprobs", reference_prompt_logprobs, "the prompt penalty"
    )
    require_logprobs("target_prompt_logprobs", target.detach(), prompt_mask)
    require_logprobs("reference_prompt_logprobs", reference.detach(), prompt_mask)
    away = log_ratio(target, reference.detach(), prompt_mask)
    return estimate_kl(away.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), KlEstimator.K3)


def prompt_weights(nll: Tensor, *, clip: float | None) -> Tensor:
    """Weight of each prompt, mean(nll) / nll in [0, clip]: [Q], detached, dtype of nll.

    nll: [Q], sum of -log p over the prompt's tokens, in nats, of the distinct prompts of the whole
        batch: the mean is over all of them. clip: None leaves the weights as they are.

    A prompt that the model finds unlikely counts less. Raises InputError for shapes, dtypes, nll
    that is not finite and positive, and a clip that is not positive.
    """
    require_floating("nll", nll)
    if nll.dim() != 1 or nll.numel() == 0:
        raise InputError(f"nll: expected shape [Q] with Q >= 1, got {list(nll.shape)}")
    require_finite("nll", nll)
    if bool((nll <= 0).any()):
        raise InputError(f"nll: a prompt's -log p must be > 0, got {float(nll.min())}")
    if clip is not None and not clip > 0:
        raise InputError(f"clip: must be > 0 or None, got {clip}")
    wide = nll.detach().double()
    weights = wide.mean() / wide
    return weights.clamp(max=clip).to(nll.dtype) if clip is not None else weights.to(nll.dtype)
