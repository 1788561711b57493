"""The batch as a whole, as advantage estimators and batch-wide masks see it, before any step.

Rows are trajectories, padded to a common length. Everything is detached. What stands at masked
places never matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from correction.checks import (
    require_bools,
    require_finite,
    require_floating,
    require_given,
    require_integers,
    require_mask,
    require_range,
    require_shape,
)
from correction.errors import InputError
from correction.needs import Need


@dataclass(frozen=True, kw_only=True)
class BatchView:
    """One batch: N trajectories of up to T tokens.

    rewards: [N] floating, of whole episodes. group_index: [N] int64, any number that siblings
    share. action_mask: [N, T] bool, true on sampled tokens. turn_ids: [N, T] int64, in [0, T) at
    sampled tokens. behaviour_logprobs: [N, T]. truncated: [N] bool, cut by a limit, not finished.
    scores: [N, T], log theta before the first step. reference_logprobs: [N, T]. values: [N, T], V
    of the state before each sampled token; final_values: [N], V after the last token.
    teacher_logprobs: [N, T], with teacher_versions and behaviour_versions [N, T] int64.
    segment_ids: [N, T] int64, equal where branches share a token's segment, negative elsewhere.
    prompt_nll: [N], -log p of the prompt's tokens under whose surprise weighs prompts, in nats.
    Optional ones are None unless the recipe `needs` them. Raises InputError for shapes, dtypes,
    and non-finite numbers at sampled tokens.
    """

    rewards: Tensor
    group_index: Tensor
    action_mask: Tensor
    turn_ids: Tensor
    behaviour_logprobs: Tensor
    truncated: Tensor
    scores: Tensor | None = None
    reference_logprobs: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_versions: Tensor | None = None
    behaviour_versions: Tensor | None = None
    segment_ids: Tensor | None = None
    prompt_nll: Tensor | None = None

    def __post_init__(self) -> None:
        require_mask("action_mask", self.action_mask)
        rows, columns = self.action_mask.shape
        require_floating("rewards", self.rewards)
        require_shape("rewards", self.rewards, (rows,))
        require_finite("rewards", self.rewards)
        require_integers("group_index", self.group_index)
        require_shape("group_index", self.group_index, (rows,))
        require_bools("truncated", self.truncated)
        require_shape("truncated", self.truncated, (rows,))
        require_integers("turn_ids", self.turn_ids)
        require_shape("turn_ids", self.turn_ids, (rows, columns))
        require_range("turn_ids", self.turn_ids, self.action_mask, 0, columns)
        for name, values in self._token_tensors.items():
            require_floating(name, values)
            require_shape(name, values, (rows, columns))
            require_finite(name, values, self.action_mask)
        for name in ("final_values", "prompt_nll"):
            if getattr(self, name) is not None:
                require_shape(name, getattr(self, name), (rows,))
                require_finite(name, getattr(self, name))

    @cached_property
    def _token_tensors(self) -> Mapping[str, Tensor]:
        names = ("behaviour_logprobs", "scores", "reference_logprobs", "values", "teacher_logprobs")
        present = {name: getattr(self, name) for name in names}
        return {name: values for name, values in present.items() if values is not None}

    def required(self, name: str, need: Need) -> Tensor:
        """A tensor that a part cannot do without. Raises InputError where it is missing."""
        values: Tensor | None = getattr(self, name)
        return require_given(name, values, f"a recipe that needs {need}")

    @cached_property
    def action_counts(self) -> Tensor:
        """Sampled tokens of each trajectory: [N] int64."""
        counts: Tensor = self.action_mask.sum(dim=-1)
        return counts

    def bootstrap(self, bootstrap_truncated: bool) -> Tensor:
        """V after the last token of truncated trajectories, 0 for finished ones: [N].

        An episode that a limit cut would have gone on: what it would have earned is its value.
        """
        final = self.required("final_values", Need.VALUES)
        if not bootstrap_truncated:
            return torch.zeros_like(final)
        return torch.where(self.truncated, final, torch.zeros_like(final))

    def same_version_teacher(self) -> Tensor:
        """Teacher logprobs, refused unless the teacher was the version that sampled each token.

        Otherwise teacher / mu would hold policy lag beside what the teacher knows.
        """
        teacher = self.required("teacher_logprobs", Need.TEACHER)
        versions = self.required("teacher_versions", Need.TEACHER)
        sampled = self.required("behaviour_versions", Need.TEACHER)
        differ = (versions != sampled) & self.action_mask
        if bool(differ.any()):
            place = differ.nonzero()[0].tolist()
            raise InputError(
                f"teacher_versions: {int(differ.sum())} tokens were scored by another version than "
                f"the one that sampled them, the first at {place}"
            )
        return teacher
