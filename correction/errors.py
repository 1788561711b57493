"""The one exception tree.

    LagwiseError
    ├── ConfigError            the request or configuration was wrong: exit code 2
    │   └── RecipeError        parts of a correction that may not be combined
    ├── InputError             a tensor argument breaks a rule (shape, dtype, mask, finite)
    ├── TrajectoryError        bytes or a record that are not a valid trajectory group
    ├── EngineError            an engine failed; it must not serve any more
    │   └── SwapError          a weight update failed or was not proven by its canary
    ├── SwapRefused            a weight update was refused before anything was touched
    ├── EnvironmentFailure     an environment or tool failed for a reason that is not the policy's
    └── RunError               the run cannot go on: exit code 1

Each floor raises only errors of this tree for what it detects itself; errors of the libraries
travel unchanged unless they are caught to retry, to account or to release.
"""

from __future__ import annotations


class LagwiseError(Exception):
    """Root of every error that lagwise raises itself."""


class ConfigError(LagwiseError, ValueError):
    """The request or the configuration was wrong. The message names the key and the way out."""


class RecipeError(ConfigError):
    """A named method or an override that may not be combined with the rest."""


class InputError(LagwiseError, ValueError):
    """An argument of a correction breaks one of its rules. The message names the argument."""


class TrajectoryError(LagwiseError, ValueError):
    """Bytes or a record that are not a valid trajectory group.

    `reason` is a short, bounded label fit for a metric (for example `"length_mismatch"`).
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[TrajectoryError], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


class EngineError(LagwiseError, RuntimeError):
    """An engine failed and must not serve any more."""


class SwapError(EngineError):
    """A weight update failed half-way or its canary did not agree with the learner."""


class SwapRefused(LagwiseError, RuntimeError):
    """A weight update was refused before anything was touched: the engine goes on unharmed.

    `reason` is a short, bounded label fit for a metric: `"busy"`, `"superseded"`, `"corrupt"`,
    `"missing"`, `"no_room"`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[SwapRefused], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


class EnvironmentFailure(LagwiseError, RuntimeError):
    """An environment or tool failed for a reason that the policy did not cause.

    Raise it inside an environment to have the trajectory dropped by name instead of rewarded.
    """


class RunError(LagwiseError, RuntimeError):
    """The run cannot go on. The message is the first cause."""
