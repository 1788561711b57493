"""The shaping slot: what is done about overlong answers. The mathematics is in `shaping`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from correction import shaping
from correction.batch_view import BatchView
from correction.checks import require_parameter


@dataclass(frozen=True, slots=True)
class Shaping:
    """Base: changes nothing."""

    kind: ClassVar[str]

    def rewards(self, view: BatchView, limit_tokens: int) -> Tensor:
        """Rewards [N] to go on with. limit_tokens: the run's limit of one trajectory."""
        return view.rewards

    def action_mask(self, view: BatchView) -> Tensor:
        """Tokens [N, T] that the loss may see."""
        return view.action_mask


@dataclass(frozen=True, slots=True)
class OverlongPenalty(Shaping):
    """DAPO's soft punishment: from 0 down to -coefficient over the last `cache_share` of the limit.

    max_tokens: sampled tokens from which it is whole; 0 takes the run's limit of one trajectory.
    It is whole for every answer that a limit cut.
    """

    max_tokens: int = 0
    cache_share: float = 0.2
    coefficient: float = 1.0
    kind: ClassVar[str] = "overlong_penalty"

    def __post_init__(self) -> None:
        key = "shaping.overlong_penalty"
        require_parameter(self.max_tokens >= 0, f"{key}.max_tokens", ">= 0", self.max_tokens)
        require_parameter(
            0 < self.cache_share <= 1, f"{key}.cache_share", "in (0, 1]", self.cache_share
        )
        require_parameter(self.coefficient > 0, f"{key}.coefficient", "> 0", self.coefficient)

    def rewards(self, view: BatchView, limit_tokens: int) -> Tensor:
        """Rewards [N] with the penalty added."""
        limit = self.max_tokens or limit_tokens
        penalty = shaping.overlong_penalty(
            view.action_counts,
            max_tokens=limit,
            cache_tokens=max(1, round(self.cache_share * limit)),
        )
        # A limit of turns or of context may cut an answer before the limit of its tokens.
        penalty = penalty.masked_fill(view.truncated, -1.0)
        return view.rewards + self.coefficient * penalty.to(view.rewards.dtype)


@dataclass(frozen=True, slots=True)
class OverlongFilter(Shaping):
    """Takes truncated answers out of the loss and its denominators; baselines still see them."""

    kind: ClassVar[str] = "overlong_filter"

    def action_mask(self, view: BatchView) -> Tensor:
        """The mask without truncated rows."""
        return shaping.mask_truncated(view.action_mask, view.truncated)
