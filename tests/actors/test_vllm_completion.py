"""vLLM's output becomes a completion only if everything in it adds up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest

from actors.engine import Completion
from actors.trajectory.record import VersionRun
from actors.vllm_completion import (
    SampledOutput,
    canary_mismatch,
    completion_of,
    version_runs_of,
)
from actors.weights import Canary
from correction.errors import EngineError, InputError
from correction.versions import PolicyVersion


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Flat:
    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=lambda: [7, 8, 9])
    logprobs: Flat | None = field(
        default_factory=lambda: Flat([0, 1, 2], [1, 2, 3], [7, 8, 9], [-0.1, -0.2, -0.3])
    )
    finish_reason: str | None = "stop"
    weight_versions: list[Span] | None = field(
        default_factory=lambda: [Span("0.4", 0, 1), Span("1.5", 1, 3)]
    )


def converted(output: Output, generation_s: float = 0.0) -> Completion:
    return completion_of(cast(SampledOutput, output), generation_s)


def test_ids_logprobs_and_versions_line_up() -> None:
    completion = converted(Output(), 1.5)
    assert completion.action_ids.tolist() == [7, 8, 9]
    np.testing.assert_allclose(completion.behaviour_logprobs, [-0.1, -0.2, -0.3])
    assert completion.version_runs == (
        VersionRun(PolicyVersion(0, 4), 1),
        VersionRun(PolicyVersion(1, 5), 2),
    )
    assert (completion.finish, completion.generation_s) == ("stop", 1.5)


def test_logprob_is_found_by_id_where_a_position_holds_several() -> None:
    several = Flat([0, 2, 3], [2, 3, 5], [5, 7, 8, 6, 9], [-9.0, -0.1, -0.2, -9.0, -0.3])
    completion = converted(Output(logprobs=several))
    np.testing.assert_allclose(completion.behaviour_logprobs, [-0.1, -0.2, -0.3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "abort"}, "abort"),
        ({"finish_reason": None}, "None"),
        ({"token_ids": []}, "without a sampled token"),
        ({"logprobs": None}, "no logprobs"),
        ({"logprobs": Flat([0, 1], [1, 2], [7, 8], [-0.1, -0.2])}, "2 logprobs for 3"),
        ({"logprobs": Flat([0, 1, 2], [1, 2, 3], [7, 9, 8], [-1.0] * 3)}, "token 8 at 1"),
        ({"weight_versions": None}, "cover 0 of 3"),
        ({"weight_versions": [Span("0.4", 0, 2)]}, "cover 2 of 3"),
        ({"weight_versions": [Span("0.4", 0, 1), Span("0.5", 2, 3)]}, "gap at token 1"),
        ({"weight_versions": [Span("0.4", 0, 4)]}, "cover 4 of 3"),
    ],
)
def test_output_that_contradicts_itself_is_an_engine_error(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        converted(replace(Output(), **change))  # type: ignore[arg-type]


def test_label_that_is_not_a_policy_version_is_refused() -> None:
    with pytest.raises(InputError, match="policy version"):
        version_runs_of([Span("default", 0, 3)], 3)


def test_empty_span_of_a_swap_before_the_first_token_leaves_no_run() -> None:
    spans = [Span("0.4", 0, 0), Span("0.5", 0, 3)]
    assert version_runs_of(spans, 3) == (VersionRun(PolicyVersion(0, 5), 3),)


def test_canary_mismatch_is_the_worst_token_and_never_hides_a_nan() -> None:
    canary = Canary((3, 7, 8), (-0.5, -0.25), tolerance=0.1)
    prompt = Flat([0, 0, 1], [0, 1, 2], [7, 8], [-0.5, -0.75])
    assert canary_mismatch(canary, prompt) == pytest.approx(0.5)
    prompt.logprobs[0] = math.nan
    assert math.isnan(canary_mismatch(canary, prompt))
    with pytest.raises(EngineError):
        canary_mismatch(canary, Flat([0, 0], [0, 1], [7], [-0.5]))
    with pytest.raises(EngineError):
        canary_mismatch(canary, None)
