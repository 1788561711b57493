"""What a recipe asks of the rest of the system, so that nothing is computed or sent for nothing."""

from __future__ import annotations

from enum import StrEnum


class Need(StrEnum):
    """Something beside mu and theta at the sampled tokens. `check` prints what a recipe needs."""

    SCORES = "scores"
    """The whole batch under the learner's weights before the first step: one more forward pass."""
    VALUES = "values"
    """A critic: V of the state before each token, and after the last."""
    REFERENCE = "reference"
    """Logprobs of a frozen reference policy: its weights in memory and a forward pass."""
    HEAD = "head"
    """The engine's top-k ids and logprobs at each sampled token."""
    PROMPT = "prompt"
    """Logprobs of the prompt's tokens, of theta and of the reference."""
    ENTROPY = "entropy"
    """Entropy of theta at each sampled token."""
    PRETRAINING = "pretraining"
    """A stream of pretraining text."""
    TEACHER = "teacher"
    """Logprobs of the sampled tokens under a teacher of the same version as mu."""
    SEGMENTS = "segments"
    """Which tokens the branches of a group share."""
    EXPERT = "expert"
    """Tokens that an expert chose, in place of the policy's own."""
