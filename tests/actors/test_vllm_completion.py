"""vLLM's output becomes a completion only if everything in it adds up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest

from actors.engine import Completion
from actors.trajectory.head import check_head
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


def converted(
    output: Output, generation_s: float = 0.0, head: tuple[int, int] = (0, 0)
) -> Completion:
    """head: how many head tokens, and how many of them vLLM was asked for."""
    return completion_of(
        cast(SampledOutput, output), generation_s, head_tokens=head[0], asked_tokens=head[1]
    )


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


HEADED = Output(
    token_ids=[7, 8],
    logprobs=Flat([0, 3], [3, 6], [7, 5, 7, 8, 8, 6], [-0.9, -0.6, -0.9, -0.25, -0.25, -math.inf]),
    weight_versions=[Span("0.4", 0, 2)],
)


def test_a_head_is_what_follows_the_sampled_token() -> None:
    completion = converted(HEADED, head=(2, 2))
    assert completion.head_ids is not None
    assert completion.head_logprobs is not None
    assert completion.head_ids.dtype == np.int32
    assert completion.head_logprobs.dtype == np.float32
    assert completion.head_ids[0].tolist() == [5, 7]
    np.testing.assert_allclose(completion.head_logprobs[0], [-0.6, -0.9])
    np.testing.assert_allclose(completion.behaviour_logprobs, [-0.9, -0.25])
    check_head(
        completion.head_ids,
        completion.head_logprobs,
        completion.action_ids,
        completion.behaviour_logprobs,
    )


def test_a_token_without_a_probability_and_a_small_vocabulary_leave_padding() -> None:
    completion = converted(HEADED, head=(4, 2))
    assert completion.head_ids is not None
    assert completion.head_logprobs is not None
    assert completion.head_ids.tolist() == [[5, 7, -1, -1], [8, -1, -1, -1]]
    assert np.isneginf(completion.head_logprobs[:, 2:]).all()
    assert np.isneginf(completion.head_logprobs[1, 1])


def test_without_a_head_asked_for_there_is_none() -> None:
    completion = converted(HEADED)
    assert (completion.head_ids, completion.head_logprobs) == (None, None)
    np.testing.assert_allclose(completion.behaviour_logprobs, [-0.9, -0.25])


@pytest.mark.parametrize(
    "flat",
    [
        Flat([0, 2], [2, 4], [7, 5, 8, 6], [-0.7, -0.6, -0.25, -3.0]),
        Flat([0, 4], [4, 7], [7, 5, 7, 3, 8, 8, 6], [-0.7, -0.6, -0.7, -3, -0.25, -0.25, -3.0]),
        Flat([0, 3], [3, 5], [7, 5, 7, 8, 8], [-0.7, -0.6, -0.7, -0.25, -0.25]),
    ],
    ids=["all shorter", "one longer", "one shorter"],
)
def test_a_head_that_was_not_asked_for_so_is_an_engine_error(flat: Flat) -> None:
    with pytest.raises(EngineError, match="2 logprobs asked for"):
        converted(replace(HEADED, logprobs=flat), head=(2, 2))


def test_a_head_that_is_not_a_number_is_not_sound() -> None:
    sound = converted(HEADED, head=(2, 2))
    assert sound.is_sound
    assert sound.head_logprobs is not None
    broken = sound.head_logprobs.copy()
    broken[0, 1] = math.nan
    assert not replace(sound, head_logprobs=broken).is_sound
    assert not replace(sound, behaviour_logprobs=np.array([-1, -np.inf], np.float32)).is_sound


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
