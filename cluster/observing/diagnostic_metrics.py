"""How the diagnostics of `correction.pooling.summarise` become Prometheus gauges.

All describe the last step. A diagnostic that a step does not have (no token in a bucket of lag)
is absent from the endpoint too, instead of keeping the value of an earlier step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from cluster.observing.metric import PREFIX, Section

ESS_RAW = "ess_ratio_token_raw"
ESS_BOUNDED = "ess_ratio_token_bounded"
LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
_LEVELS = ("token", "trajectory")
_STAGES = ("raw", "bounded")
_SIDES = ("low", "high", "dual")
_SIGNS = ("positive", "negative")
_ESTIMATORS = ("k1", "k3")

_section = Section("Correction")
METRICS = (
    _section.gauge(
        "ess_ratio",
        "Effective sample size over size, of learner/mu (raw) and of the weights used (bounded).",
        "level",
        "stage",
    ),
    _section.gauge("importance_weight_mean", "Mean importance weight of a token.", "stage"),
    _section.gauge("weight_changed_ratio", "Share of tokens whose weight the bound changed."),
    _section.gauge("rejected_ratio", "Share of tokens with weight 0 by rejection."),
    _section.gauge(
        "clip_ratio", "Share of tokens that the surrogate clipped.", "side", "advantage"
    ),
    _section.gauge("kl_nats", "KL divergence a token, by pair of policies.", "pair", "estimator"),
    _section.gauge("m2", "Mean squared log of learner/mu."),
    _section.gauge("chi2", "Mean squared ratio of learner/mu, minus 1.", "level"),
    _section.gauge("log_ratio_abs_max_nats", "Largest log ratio of a token.", "pair"),
    _section.gauge(
        "behaviour_kl_nats",
        "KL of mu to the learner on tokens at lag 0 (engine mismatch) and at lag >= 1 (lagged).",
        "tokens",
        "estimator",
    ),
    _section.gauge(
        "behaviour_log_ratio_abs_max_nats",
        "Largest |log learner/mu| at lag 0 (mismatch) and at lag >= 1 (lagged).",
        "tokens",
    ),
    _section.gauge("mismatch_tokens", "Tokens at lag 0 that the mismatch was measured on."),
    _section.gauge("ess_ratio_by_lag", "Raw token ESS ratio, by policy lag.", "lag"),
    _section.gauge("kl_k3_by_lag_nats", "KL (k3) of mu to the learner, by policy lag.", "lag"),
    _section.gauge("importance_weight_mean_by_lag", "Mean raw weight, by policy lag.", "lag"),
)

Place = tuple[str, tuple[str, ...]]


def _places() -> dict[str, Place]:
    places: dict[str, Place] = {
        "weight_changed_fraction": ("weight_changed_ratio", ()),
        "rejected_fraction": ("rejected_ratio", ()),
        "m2": ("m2", ()),
        "log_ratio_abs_max": ("log_ratio_abs_max_nats", ("mu_learner",)),
        "log_ratio_update_abs_max": ("log_ratio_abs_max_nats", ("prox_theta",)),
        "mismatch_tokens": ("mismatch_tokens", ()),
    }
    for stage in _STAGES:
        places[f"weight_mean_{stage}"] = ("importance_weight_mean", (stage,))
        for level in _LEVELS:
            places[f"ess_ratio_{level}_{stage}"] = ("ess_ratio", (level, stage))
    for level in _LEVELS:
        places[f"chi2_{level}"] = ("chi2", (level,))
    for side in _SIDES:
        for sign in _SIGNS:
            places[f"clip_fraction_{side}_{sign}"] = ("clip_ratio", (side, sign))
    return places | _divergence_places() | _lag_places()


def _divergence_places() -> dict[str, Place]:
    places: dict[str, Place] = {}
    for estimator in _ESTIMATORS:
        for pair in ("mu_learner", "prox_theta"):
            places[f"kl_{estimator}_{pair}"] = ("kl_nats", (pair, estimator))
        for tokens in ("mismatch", "lagged"):
            places[f"{tokens}_kl_{estimator}"] = ("behaviour_kl_nats", (tokens, estimator))
    for tokens in ("mismatch", "lagged"):
        name = f"{tokens}_log_ratio_abs_max"
        places[name] = ("behaviour_log_ratio_abs_max_nats", (tokens,))
    return places


def _lag_places() -> dict[str, Place]:
    sources = {
        ESS_RAW: "ess_ratio_by_lag",
        "kl_k3_mu_learner": "kl_k3_by_lag_nats",
        "weight_mean_raw": "importance_weight_mean_by_lag",
    }
    return {
        f"{source}@lag={bucket}": (name, (bucket,))
        for source, name in sources.items()
        for bucket in LAG_BUCKETS
    }


PLACES: Mapping[str, Place] = {
    diagnostic: (PREFIX + name, labels) for diagnostic, (name, labels) in _places().items()
}
"""Name of a diagnostic -> metric and label values."""


def gauges(diagnostics: Mapping[str, float]) -> dict[str, dict[tuple[str, ...], float]]:
    """All diagnostic gauges of one step: metric -> label values -> value.

    Diagnostics without a metric stay in steps.jsonl only. Every metric is a key, with nothing
    under it where the step has no such diagnostic.
    """
    found: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for diagnostic, (name, labels) in PLACES.items():
        values = found[name]
        if diagnostic in diagnostics:
            values[labels] = diagnostics[diagnostic]
    return dict(found)
