"""From token losses to one number, with the denominators of the global batch passed in.

With token losses L, n_i action tokens in trajectory i:

    token_mean                sum of L / action_tokens                      DAPO, 2503.14476
    sequence_mean_token_mean  sum over i of (sum L_i / n_i) / trajectories  GRPO, 2402.03300
    sequence_mean_token_sum   sum of L / trajectories                       REINFORCE
    constant                  sum of L / (trajectories x max_tokens)        Dr. GRPO, 2503.20783
    token_sum                 sum of L

Denominators count the *original* action tokens of all ranks and micro-batches. So micro-batch
losses simply add up to the loss of the batch, however it was split, and a rejected token makes
nobody else's step larger. A mean of micro-batch means would be another number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from correction.errors import InputError
from correction.masks import fill_masked, masked_count


class Aggregation(StrEnum):
    """How token losses become one loss. Formulas: module docstring."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"
    CONSTANT = "constant"
    TOKEN_SUM = "token_sum"


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of the global batch: of all ranks and all micro-batches of one optimiser step.

    action_tokens: true places of the action masks. trajectories: those with at least one action
    token. max_tokens: the generation limit of one trajectory, in tokens; for `constant` only.
    prompt_tokens: of all prompts, for a prompt penalty only; 0 where nobody asks.
    Raises InputError unless all others are positive.
    """

    action_tokens: int
    trajectories: int
    max_tokens: int
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("action_tokens", "trajectories", "max_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"denominators.{name}: must be >= 1, got {getattr(self, name)}")


def check_denominators(mask: Tensor, denominators: Denominators) -> None:
    """Raise InputError where a part holds more than the whole: local counts were passed in."""
    tokens, trajectories = int(mask.sum()), int(mask.any(dim=-1).sum())
    if denominators.action_tokens < tokens or denominators.trajectories < trajectories:
        raise InputError(
            f"denominators: {denominators} is less than this micro-batch alone ({tokens} action "
            f"tokens in {trajectories} trajectories); pass the counts of the global batch"
        )


def aggregate(
    losses: Tensor, mask: Tensor, aggregation: Aggregation, denominators: Denominators
) -> Tensor:
    """This part's share of the global loss: losses [B, T], mask [B, T] bool -> scalar.

    A trajectory must lie in one part as a whole. The sum of all parts' shares is the global loss.
    """
    masked = fill_masked(losses, mask)
    if aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
        masked = masked / masked_count(mask, losses.dtype)[:, None]
    return masked.sum() / _denominator(aggregation, denominators)


def _denominator(aggregation: Aggregation, denominators: Denominators) -> int:
    if aggregation is Aggregation.TOKEN_MEAN:
        return denominators.action_tokens
    if aggregation is Aggregation.CONSTANT:
        return denominators.trajectories * denominators.max_tokens
    if aggregation is Aggregation.TOKEN_SUM:
        return 1
    return denominators.trajectories


def count_denominators(mask: Tensor, *, max_tokens: int) -> Denominators:
    """Denominators of a batch that is here as a whole: mask [B, T] bool."""
    trajectories = int(mask.any(dim=-1).sum())
    return Denominators(int(mask.sum()), trajectories, max_tokens)
