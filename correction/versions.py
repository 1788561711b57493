"""Policy versions, version spans and policy lag: the one place where lag is defined.

A policy version counts the optimiser steps applied to the weights, from 0, inside one learner
epoch (incarnation). Policy lag is the learner's version minus the behaviour version, in
optimiser steps, measured where the data is consumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from correction.errors import InputError


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """Version of a policy. Ordered by (epoch, step).

    epoch: incarnation of the learner, from 0; a restarted learner begins a new one.
    step: optimiser steps applied to the weights, from 0.
    """

    epoch: int
    step: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.step < 0:
            raise InputError(f"policy version: epoch and step must be >= 0, got {self}")

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of `str`. Raises InputError on anything else."""
        epoch, dot, step = text.partition(".")
        if not (dot and epoch.isdecimal() and step.isdecimal()):
            raise InputError(f"policy version: expected 'epoch.step', got {text!r}")
        return cls(int(epoch), int(step))

    def next_step(self) -> PolicyVersion:
        """The version after one more applied optimiser step."""
        return PolicyVersion(self.epoch, self.step + 1)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Oldest and newest version that touched one trajectory or group."""

    oldest: PolicyVersion
    newest: PolicyVersion

    def __post_init__(self) -> None:
        if self.oldest > self.newest:
            raise InputError(f"version span: oldest {self.oldest} is after newest {self.newest}")

    @classmethod
    def of(cls, versions: Iterable[PolicyVersion]) -> VersionSpan:
        """Span of a non-empty collection of versions."""
        seen = list(versions)
        if not seen:
            raise InputError("version span: no versions")
        return cls(min(seen), max(seen))


def policy_lag(learner: PolicyVersion, behaviour: PolicyVersion) -> int:
    """Lag in optimiser steps of data that `behaviour` sampled, at learner version `learner`.

    Steps are comparable across epochs because a new epoch continues the step count from the
    checkpoint that it resumed; whether data of an old epoch is still valid is `same_lineage`'s
    question. Raises InputError for a version from the future: it is never lag 0.
    """
    lag = learner.step - behaviour.step
    if behaviour > learner or lag < 0:
        raise InputError(f"policy lag: behaviour {behaviour} is ahead of the learner {learner}")
    return lag


def same_lineage(behaviour: PolicyVersion, epoch: int, epoch_started_at_step: int) -> bool:
    """Whether `behaviour` is an ancestor of the learner's epoch, which resumed at a given step.

    Data of an older epoch at steps up to the resumed one come from weights that this epoch
    shares; later ones come from a branch that was lost (design, section 2 of reliability).
    """
    if behaviour.epoch == epoch:
        return True
    return behaviour.epoch < epoch and behaviour.step <= epoch_started_at_step
