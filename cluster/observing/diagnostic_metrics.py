"""How the figures of a step become Prometheus gauges; what they mean is said where they are made.

Figures are those of `correction.pooling.summarise`, of `correction.preparation` and of the
learner's passes. All describe the last step. A figure that a step does not have (another recipe,
no token in a bucket of lag) is absent from the endpoint too: neither 0 nor of an earlier step.

Names of trust masks and penalties are written out, not imported: the views load without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from cluster.observing.metric import PREFIX, Metric, Section

ESS_RAW = "ess_ratio_token_raw"
ESS_BOUNDED = "ess_ratio_token_bounded"
REJECTED = "rejected_fraction"
KL_REFERENCE = "kl_k3_theta_reference"
ENTROPY = "entropy"
VALUE_ERROR_SQUARED = "value_error_squared"

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
TRUST_MASKS = (
    *("max_lag", "geometric_band", "k3_limit", "trm", "veto"),
    *("dppo_tv", "dppo_kl", "kpop", "m2", "opsm"),
)
PENALTIES = ("kl", "prompt_kl", "entropy", "log_ratio_square", "pretraining")
REJECTED_BY_RULE = {f"rejected_fraction_by_{rule}": (rule,) for rule in TRUST_MASKS}

_LEVELS = ("token", "trajectory")
_STAGES = ("raw", "bounded")
_SIDES = ("low", "high", "dual")
_SIGNS = ("positive", "negative")
_ESTIMATORS = ("k1", "k3")
_PAIRS = ("mu_learner", "prox_theta", "theta_reference")
_POLICIES = ("behaviour", "target")
_TOKENS = ("mismatch", "lagged")
_LOSS_PARTS = ("policy", "critic", *PENALTIES)

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """One gauge. figures: name of each figure that it shows -> label values."""

    metric: Metric
    figures: Mapping[str, Labels]


@dataclass(frozen=True, slots=True)
class _Chapter:
    """Builds the gauges of one section of the reference."""

    section: Section

    def one(self, name: str, figure: str, help: str) -> _Family:
        """A gauge without labels."""
        return self.many(name, {figure: ()}, help)

    def many(self, name: str, figures: Mapping[str, Labels], help: str, *labels: str) -> _Family:
        """A gauge of exactly these figures."""
        metric = self.section.gauge(name, help, *labels, max_series=len(figures))
        return _Family(metric, figures)


_whole = _Chapter(Section("Correction"))
_bucketed = _Chapter(Section("Correction by policy lag"))

_BY_LAG_TOO = (
    _whole.one("measured_tokens", "tokens", "Action tokens that the loss saw."),
    _whole.one("measured_trajectories", "trajectories", "Trajectories that the loss saw."),
    _whole.many(
        "ess_ratio",
        {f"ess_ratio_{a}_{b}": (a, b) for a, b in product(_LEVELS, _STAGES)},
        "Effective sample size over size, of learner/mu (raw) and of the weights used (bounded).",
        "level",
        "stage",
    ),
    _whole.many(
        "importance_weight_mean",
        {f"weight_mean_{stage}": (stage,) for stage in _STAGES},
        "Mean importance weight of a token.",
        "stage",
    ),
    _whole.one(
        "weight_changed_ratio",
        "weight_changed_fraction",
        "Share of tokens whose weight the bound changed.",
    ),
    _whole.one("rejected_ratio", REJECTED, "Share of tokens with weight 0 by rejection."),
    _whole.many(
        "rejected_by_rule_ratio",
        REJECTED_BY_RULE,
        "Share of tokens that a trust mask rejected; several may reject the same one.",
        "rule",
    ),
    _whole.many(
        "clip_ratio",
        {f"clip_fraction_{a}_{b}": (a, b) for a, b in product(_SIDES, _SIGNS)},
        "Share of tokens that the surrogate clipped.",
        "side",
        "advantage",
    ),
    _whole.many(
        "kl_nats",
        {f"kl_{a}_{b}": (b, a) for a, b in product(_ESTIMATORS, _PAIRS)},
        "KL divergence a token, on tokens of mu, by pair of policies.",
        "pair",
        "estimator",
    ),
    _whole.one("m2", "m2", "Mean squared log of learner/mu."),
    _whole.many(
        "chi2",
        {f"chi2_{level}": (level,) for level in _LEVELS},
        "Mean squared ratio of learner/mu, minus 1.",
        "level",
    ),
    _whole.many(
        "log_ratio_abs_max_nats",
        {"log_ratio_abs_max": ("mu_learner",), "log_ratio_update_abs_max": ("prox_theta",)},
        "Largest log ratio of a token.",
        "pair",
    ),
    _whole.one("entropy_nats", ENTROPY, "Mean entropy of theta where a token was sampled."),
    _whole.one("vtrace_rho_mean", "vtrace_rho", "Mean theta/mu of V-trace, under rho_bar."),
    _whole.one(
        "vtrace_advantage_mean", "vtrace_advantage", "Mean advantage of V-trace in this pass."
    ),
    _whole.one("value_mean", "value", "Mean value by the critic, in units of reward."),
    _whole.one(
        "value_error_squared_mean",
        VALUE_ERROR_SQUARED,
        "Mean squared error of the critic against its targets, in units of reward squared.",
    ),
    _whole.many(
        "head_mass_ratio",
        {f"head_mass_{policy}": (policy,) for policy in _POLICIES},
        "Mean probability of a head, under mu (behaviour) and under theta (target).",
        "policy",
    ),
    _whole.one(
        "head_tail_ratio", "head_tail_ratio", "Mean mu/theta of the probability outside a head."
    ),
    _whole.one(
        "centering_l1",
        "centering_l1",
        "Mean sum of the absolute coefficients of a head in Score Centering.",
    ),
)


def _by_lag(family: _Family) -> _Family:
    """The same figures of each bucket of policy lag, under `NAME_by_lag`."""
    metric = family.metric
    figures = {
        f"{figure}@lag={bucket}": (*values, bucket)
        for figure, values in family.figures.items()
        for bucket in LAG_BUCKETS
    }
    name = f"{metric.name.removeprefix(PREFIX)}_by_lag"
    return _bucketed.many(name, figures, f"By policy lag: {metric.help}", *metric.labels, "lag")


_WHOLE_ONLY = (
    _whole.many(
        "behaviour_kl_nats",
        {f"{a}_kl_{b}": (a, b) for a, b in product(_TOKENS, _ESTIMATORS)},
        "KL of mu to the learner on tokens at lag 0 (engine mismatch) and at lag >= 1 (lagged).",
        "tokens",
        "estimator",
    ),
    _whole.many(
        "behaviour_log_ratio_abs_max_nats",
        {f"{tokens}_log_ratio_abs_max": (tokens,) for tokens in _TOKENS},
        "Largest |log learner/mu| at lag 0 (mismatch) and at lag >= 1 (lagged).",
        "tokens",
    ),
    _whole.one(
        "mismatch_tokens", "mismatch_tokens", "Tokens at lag 0 that mismatch is measured on."
    ),
    _whole.one("lagged_tokens", "lagged_tokens", "Tokens at lag >= 1 that lagged is measured on."),
    _whole.one("advantage_mean", "advantage_mean", "Mean advantage of an action token."),
    _whole.one(
        "advantage_std", "advantage_std", "Standard deviation of the advantage of action tokens."
    ),
    _whole.one(
        "zero_variance_groups_ratio",
        "zero_variance_group_fraction",
        "Share of groups whose rewards, before any shaping, are all equal.",
    ),
    _whole.one(
        "overlong_filtered_ratio",
        "overlong_filtered_fraction",
        "Share of action tokens that the overlong filter kept from the loss.",
    ),
    _whole.one("kl_coefficient", "kl_coefficient", "Coefficient of the KL penalty in force."),
    _whole.many(
        "loss_part",
        {f"loss_{part}": (part,) for part in _LOSS_PARTS},
        "Parts of the loss, coefficients included; they add up to it.",
        "part",
    ),
)

_FAMILIES = (*_BY_LAG_TOO, *_WHOLE_ONLY, *map(_by_lag, _BY_LAG_TOO))

METRICS = tuple(family.metric for family in _FAMILIES)

PLACES: Mapping[str, tuple[str, Labels]] = {
    figure: (family.metric.name, labels)
    for family in _FAMILIES
    for figure, labels in family.figures.items()
}
"""Name of a figure -> metric and label values."""

LABEL_VALUES: Mapping[str, tuple[Labels, ...]] = {
    family.metric.name: tuple(
        tuple(dict.fromkeys(values)) for values in zip(*family.figures.values(), strict=True)
    )
    for family in _FAMILIES
}
"""Metric -> for each of its labels all values that it takes."""

LEFT_OUT: Mapping[str, str] = {
    "loss": "`lagwise_loss` has it",
    "policy_lag_mean": "`lagwise_batch_policy_lag_mean_versions` has it, over all action tokens",
    "policy_lag_max": "`lagwise_batch_policy_lag_max_versions` has it, over all trajectories",
}
"""Figures that are in steps.jsonl only, by bucket of lag too, and why."""


def gauges(figures: Mapping[str, float]) -> dict[str, dict[Labels, float]]:
    """All these gauges after one step: metric -> label values -> value.

    Every metric is a key, with nothing under it where the step has no such figure.
    """
    found: dict[str, dict[Labels, float]] = {metric.name: {} for metric in METRICS}
    for figure, (name, labels) in PLACES.items():
        if figure in figures:
            found[name][labels] = figures[figure]
    return found
