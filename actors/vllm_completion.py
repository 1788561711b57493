"""Turns what vLLM returns into a Completion, and believes nothing that does not add up.

Pure: takes vLLM's output objects by their fields, imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from actors.engine import Completion
from actors.trajectory.head import padded_head
from actors.trajectory.record import Float32, Int32, VersionRun
from actors.weights import Canary
from correction.errors import EngineError
from correction.versions import PolicyVersion

FINISHES = ("stop", "length")


class WeightSpan(Protocol):
    """Output tokens [start, end) were sampled by the weights labelled `version`."""

    version: str
    start: int
    end: int


class FlatLogprobs(Protocol):
    """Logprobs of all positions in flat lists; a position's lie in [start, end)."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


class SampledOutput(Protocol):
    """One finished output of vLLM."""

    token_ids: Sequence[int]
    logprobs: FlatLogprobs | None
    finish_reason: str | None
    weight_versions: list[WeightSpan] | None


def completion_of(
    output: SampledOutput, generation_s: float, *, head_tokens: int = 0, asked_tokens: int = 0
) -> Completion:
    """The completion of one finished request, with heads of `head_tokens` places.

    asked_tokens: how many of these vLLM was asked for; fewer where the vocabulary has no more.
    Raises EngineError where lengths, ids or version spans contradict each other, heads are not
    what was asked for, or the request was aborted.
    """
    token_ids = list(output.token_ids)
    if output.finish_reason not in FINISHES:
        raise EngineError(f"a request ended with {output.finish_reason!r}")
    if not token_ids:
        raise EngineError("a request ended without a sampled token")
    if output.logprobs is None:
        raise EngineError("the engine returned no logprobs")
    head_ids, head_logprobs = None, None
    if head_tokens:
        heads = heads_of(output.logprobs, len(token_ids), asked_tokens)
        head_ids, head_logprobs = padded_head(*heads, head_tokens)
    return Completion(
        action_ids=np.asarray(token_ids, np.int32),
        behaviour_logprobs=logprobs_of(token_ids, output.logprobs),
        version_runs=version_runs_of(output.weight_versions, len(token_ids)),
        finish=output.finish_reason,
        generation_s=generation_s,
        head_ids=head_ids,
        head_logprobs=head_logprobs,
    )


def heads_of(flat: FlatLogprobs, tokens: int, asked_tokens: int) -> tuple[Int32, Float32]:
    """int32 and float32 [tokens, asked_tokens]: ids and logprobs, likeliest first.

    vLLM puts the sampled id before them at each position, whether or not it is one of them.
    Raises EngineError unless every position holds exactly that.
    """
    width = asked_tokens + 1
    starts = list(range(0, tokens * width, width))
    ends = [start + width for start in starts]
    if flat.start_indices != starts or flat.end_indices != ends:
        raise EngineError(f"a position does not hold the {asked_tokens} logprobs asked for")
    ids = np.asarray(flat.token_ids, np.int32).reshape(tokens, width)
    logprobs = np.asarray(flat.logprobs, np.float32).reshape(tokens, width)
    return ids[:, 1:], logprobs[:, 1:]


def logprobs_of(token_ids: Sequence[int], flat: FlatLogprobs, skip_positions: int = 0) -> Float32:
    """float32 [tokens]: the logprob of each given id, looked up by the id and never by its place.

    Raises EngineError when a position is missing or does not hold its token.
    """
    starts = flat.start_indices[skip_positions:]
    ends = flat.end_indices[skip_positions:]
    if not len(starts) == len(ends) == len(token_ids):
        raise EngineError(f"{len(starts)} logprobs for {len(token_ids)} tokens")
    found = np.empty(len(token_ids), np.float32)
    for position, (token_id, start, end) in enumerate(zip(token_ids, starts, ends, strict=True)):
        try:
            found[position] = flat.logprobs[flat.token_ids.index(token_id, start, end)]
        except ValueError as failure:
            raise EngineError(f"no logprob for token {token_id} at {position}") from failure
    return found


def version_runs_of(spans: Sequence[WeightSpan] | None, tokens: int) -> tuple[VersionRun, ...]:
    """Version spans as runs. Raises EngineError unless they cover the tokens without a gap."""
    runs: list[VersionRun] = []
    at = 0
    for span in spans or ():
        if span.start != at or span.end < span.start:
            raise EngineError(f"version spans leave a gap at token {at}")
        at = span.end
        if span.end > span.start:
            runs.append(VersionRun(PolicyVersion.parse(span.version), span.end - span.start))
    if at != tokens:
        raise EngineError(f"version spans cover {at} of {tokens} tokens")
    return tuple(runs)


def canary_mismatch(canary: Canary, flat: FlatLogprobs | None) -> float:
    """Largest |engine - learner| over the canary's tokens; NaN where either is not finite.

    flat: prompt logprobs at temperature 1; the first position is empty.
    """
    if flat is None:
        raise EngineError("the engine returned no logprobs for the canary")
    engine = logprobs_of(canary.token_ids[1:], flat, skip_positions=1).astype(np.float64)
    return float(np.abs(engine - np.asarray(canary.logprobs, np.float64)).max())
