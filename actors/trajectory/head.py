"""The head of the behaviour policy at a sampled place: its K likeliest tokens, likeliest first.

    head_ids       int32 [m, K]    token ids; -1 where there is none
    head_logprobs  float32 [m, K]  log mu of each, normalised over the whole vocabulary at the
                                   sampling temperature, in nats; -inf where there is none

A head is short where fewer than K tokens have any probability: a small vocabulary. It is of the
same distribution as the behaviour logprob of the sampled token, which may be in it or not. Eight
bytes a head token are a hundred times what a sampled token costs otherwise, so heads are asked for
only where the update needs them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from correction.errors import TrajectoryError

BYTES_PER_HEAD_TOKEN = 8
"""An id and a logprob, four bytes each."""
NO_TOKEN = -1
"""Id of a place in a short head that holds none."""
TOLERANCE_NATS = 1e-4
"""Most that the sampled token's logprob may differ from its own in the head: one row of one
softmax holds both."""
_MASS_TOLERANCE = 1e-3

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


def read_only_heads(
    ids: Ids | None, logprobs: Logprobs | None, tokens: int
) -> tuple[Ids, Logprobs]:
    """Both as read-only arrays [tokens, K]; copied only where dtype or layout is another.

    Raises TrajectoryError: "bad_head" where one is missing, "bad_shape", "length_mismatch".
    """
    if ids is None or logprobs is None:
        raise TrajectoryError("bad_head", "head_ids and head_logprobs go together")
    ids = np.ascontiguousarray(ids, np.int32)
    logprobs = np.ascontiguousarray(logprobs, np.float32)
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        raise TrajectoryError("bad_shape", "head_ids and head_logprobs must be [m, K]")
    if len(ids) != tokens or ids.shape[1] == 0:
        detail = f"{tokens} sampled tokens but heads of shape {ids.shape}"
        raise TrajectoryError("length_mismatch", detail)
    ids.setflags(write=False)
    logprobs.setflags(write=False)
    return ids, logprobs


def padded_head(ids: Ids, logprobs: Logprobs, head_tokens: int) -> tuple[Ids, Logprobs]:
    """A head of exactly `head_tokens` columns out of one with as many or fewer: both [m, n].

    A token without any probability is no part of a head, so it becomes padding as well.
    """
    tokens, columns = ids.shape
    padded_ids = np.full((tokens, head_tokens), NO_TOKEN, np.int32)
    padded_logprobs = np.full((tokens, head_tokens), -np.inf, np.float32)
    padded_ids[:, :columns] = np.where(logprobs == -np.inf, NO_TOKEN, ids)
    padded_logprobs[:, :columns] = logprobs
    return padded_ids, padded_logprobs


def check_head(
    head_ids: Ids, head_logprobs: Logprobs, action_ids: Ids, behaviour_logprobs: Logprobs
) -> None:
    """Raise TrajectoryError unless these are heads [m, K] of the tokens that were sampled [m].

    Reasons: "bad_token_id", "non_finite_logprob", "positive_logprob"; "bad_head" where padding
    and logprobs disagree, the likeliest is not first, a token occurs twice or the probabilities
    add up to more than 1; "head_mismatch" where the head contradicts the sampled token's logprob.
    """
    if head_ids.min() < NO_TOKEN:
        raise TrajectoryError("bad_token_id", f"head_ids: {head_ids.min()} is below {NO_TOKEN}")
    highest = float(head_logprobs.max())  # NaN comes through
    if np.isnan(highest):
        raise TrajectoryError("non_finite_logprob", "a head logprob is not a number")
    if highest > 0:
        raise TrajectoryError("positive_logprob", f"a head logprob of {highest}")
    if ((head_ids == NO_TOKEN) != (head_logprobs == -np.inf)).any():
        raise TrajectoryError("bad_head", "-inf must stand exactly where there is no token")
    _check_order(head_ids, head_logprobs)
    _check_sampled(head_ids, head_logprobs, action_ids, behaviour_logprobs)


def _check_order(ids: Ids, logprobs: Logprobs) -> None:
    if (logprobs[:, 1:] > logprobs[:, :-1]).any():
        raise TrajectoryError("bad_head", "the likeliest token must come first")
    if (np.exp(logprobs).sum(axis=1) > 1 + _MASS_TOLERANCE).any():
        raise TrajectoryError("bad_head", "the probabilities of a head add up to more than 1")
    ordered = np.sort(ids, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_TOKEN)).any():
        raise TrajectoryError("bad_head", "a token occurs twice in one head")


def _check_sampled(
    head_ids: Ids, head_logprobs: Logprobs, action_ids: Ids, behaviour_logprobs: Logprobs
) -> None:
    """What the head says of the sampled token; one outside it is not likelier than its last."""
    place = head_ids == action_ids[:, None]
    within = place.any(axis=1)
    said = head_logprobs[np.arange(len(place)), place.argmax(axis=1)]
    with np.errstate(invalid="ignore"):  # -inf - -inf where the sampled token is not in the head
        off = np.where(within, np.abs(said - behaviour_logprobs), 0)
    beyond = np.where(within, -np.inf, behaviour_logprobs - head_logprobs[:, -1])
    if off.max() > TOLERANCE_NATS or beyond.max() > TOLERANCE_NATS:
        detail = "a sampled token's logprob is not the one that the head gives or leaves it"
        raise TrajectoryError("head_mismatch", detail)
