import dataclasses
import itertools
import re
from collections.abc import Iterator

import pytest
import torch

from cluster.observing import metrics_catalogue
from cluster.observing.diagnostic_metrics import (
    ENTROPY,
    ESS_BOUNDED,
    ESS_RAW,
    KL_REFERENCE,
    LAG_BUCKETS,
    LEFT_OUT,
    METRICS,
    PENALTIES,
    PLACES,
    REJECTED,
    REJECTED_BY_RULE,
    TRUST_MASKS,
    VALUE_ERROR_SQUARED,
    gauges,
)
from cluster.observing.step_events import step_event
from correction import pooling
from correction.objective import summarise
from correction.parts import SEVERAL
from learner.reports import StepReport
from tests.cluster.made_passes import NOT_IN_A_TRAJECTORY, passes, varied_recipes
from tests.correction.micro_batches import make_batch, objective_of

Shown = dict[str, dict[tuple[str, ...], float]]


@pytest.fixture(scope="module")
def reports() -> dict[str, list[StepReport]]:
    """Passes of the learner under every recipe whose needs a plain trajectory meets."""
    return {
        f"{number} {recipe.name}": passes(recipe)
        for number, recipe in enumerate(varied_recipes())
        if not NOT_IN_A_TRAJECTORY & recipe.needs
    }


def summaries() -> Iterator[dict[str, float]]:
    """Figures of a micro-batch with a trajectory in every bucket of lag, under every recipe."""
    batch = make_batch(0, rows=12, columns=12)
    ages = torch.arange(12)[:, None].expand(12, 12)
    batch = dataclasses.replace(batch, lag=ages)
    for recipe in varied_recipes():
        sums = objective_of(recipe, batch).sums
        yield summarise({name: float(total) for name, total in sums.items()})


@pytest.fixture(scope="module")
def given(reports: dict[str, list[StepReport]]) -> set[str]:
    """Names of all figures that a step can have."""
    of_passes = (report.metrics for made in reports.values() for report in made)
    return {name for figures in (*of_passes, *summaries()) for name in figures}


def test_every_figure_of_a_step_has_a_place_or_a_reason_for_none(given: set[str]) -> None:
    bare = {name.partition("@")[0] for name in given - PLACES.keys()}
    assert bare == LEFT_OUT.keys()
    assert not LEFT_OUT.keys() & PLACES.keys()


def test_every_place_is_of_a_figure_that_a_step_can_have(given: set[str]) -> None:
    assert PLACES.keys() - given == set()


def test_names_written_out_are_those_of_the_correction() -> None:
    assert set(TRUST_MASKS) == SEVERAL["trust"].keys()
    assert set(PENALTIES) == SEVERAL["penalties"].keys()
    assert pooling.LAG_BUCKETS == LAG_BUCKETS
    named = {ESS_RAW, ESS_BOUNDED, REJECTED, KL_REFERENCE, ENTROPY, VALUE_ERROR_SQUARED}
    assert named | REJECTED_BY_RULE.keys() <= PLACES.keys()


def test_each_figure_has_its_own_place_with_one_value_a_label() -> None:
    labels = {metric.name: metric.labels for metric in METRICS}
    assert len(labels) == len(METRICS)
    assert len(set(PLACES.values())) == len(PLACES)
    assert {name for name, _ in PLACES.values()} == labels.keys()
    assert all(len(values) == len(labels[name]) for name, values in PLACES.values())


def test_all_that_tokens_give_is_there_by_bucket_of_lag(given: set[str]) -> None:
    split = {name.partition("@")[0] for name in given if "@" in name} - LEFT_OUT.keys()
    assert {"kl_k3_theta_reference", "rejected_fraction_by_m2", "clip_fraction_dual_negative"} < (
        split
    )
    for figure in split:
        name, labels = PLACES[figure]
        for bucket in LAG_BUCKETS:
            assert PLACES[f"{figure}@lag={bucket}"] == (f"{name}_by_lag", (*labels, bucket))


def test_the_labels_of_a_metric_are_as_many_as_its_figures() -> None:
    counts = {metric.name: metric.max_series for metric in METRICS}
    for metric in METRICS:
        assert counts[metric.name] == sum(name == metric.name for name, _ in PLACES.values())


def test_gauges_keep_what_is_known_and_name_what_is_missing() -> None:
    found = gauges({ESS_RAW: 0.5, ESS_BOUNDED: 0.9, "made_up": 1.0})
    assert found["lagwise_ess_ratio"] == {("token", "raw"): 0.5, ("token", "bounded"): 0.9}
    assert found["lagwise_m2"] == {}
    assert found.keys() == {metric.name for metric in METRICS}


def shown_of(report: StepReport) -> Shown:
    return gauges(step_event(report, 2, at_s=0.0, step_s=0.0, wait_s=0.0).metrics)


def test_a_recipe_shows_only_what_it_has(reports: dict[str, list[StepReport]]) -> None:
    by_recipe = {label.split()[1]: made[0] for label, made in reports.items()}
    plain, rejecting = shown_of(by_recipe["ppo_bypass"]), shown_of(by_recipe["geometric_rejection"])
    assert plain["lagwise_rejected_by_rule_ratio"] == {}
    assert rejecting["lagwise_rejected_by_rule_ratio"].keys() == {("geometric_band",)}
    for metric in ("entropy_nats", "value_mean", "kl_coefficient", "vtrace_rho_mean"):
        assert plain[f"lagwise_{metric}"] == {}, metric
    assert plain["lagwise_loss_part"].keys() == {("policy",)}
    assert shown_of(by_recipe["instructgpt"])["lagwise_loss_part"].keys() == {
        ("policy",), ("critic",), ("pretraining",)
    }  # fmt: skip


def test_parts_of_the_loss_add_up_to_it(reports: dict[str, list[StepReport]]) -> None:
    for label, made in reports.items():
        for report in made:
            parts = shown_of(report)["lagwise_loss_part"].values()
            assert sum(parts) == pytest.approx(report.loss, rel=1e-6, abs=1e-7), label


def test_phases_of_a_pass_are_those_that_the_catalogue_knows(
    reports: dict[str, list[StepReport]],
) -> None:
    phases = {phase for made in reports.values() for report in made for phase in report.phases_s}
    assert phases | {"decode"} == set(metrics_catalogue.LEARNER_PHASES)


def spelt_out(pattern: str) -> set[str]:
    """`a_{b,c}` as `a_b` and `a_c`."""
    pieces = [piece.split(",") for piece in re.split("[{}]", pattern)]
    return {"".join(chosen) for chosen in itertools.product(*pieces)}


def test_the_page_on_the_run_directory_names_every_figure(given: set[str]) -> None:
    page = metrics_catalogue.REFERENCE_PATH.with_name("run_directory.md").read_text("utf-8")
    by_lag, whole = page.split("### Of ")[1:]
    split = {name.partition("@")[0] for name in given if "@" in name}
    bare = {name for name in given if "@" not in name}
    for chapter, figures in ((by_lag, split), (whole, bare - split)):
        rows = re.findall(r"^\| (`.+?`) \|", chapter, re.MULTILINE)
        patterns = re.findall("`([^`]+)`", " ".join(rows))
        assert set().union(*map(spelt_out, patterns)) == figures


def test_the_reference_names_the_values_of_every_label() -> None:
    (row,) = re.findall(r"^\| `lagwise_kl_nats` .*$", metrics_catalogue.reference(), re.MULTILINE)
    assert "`pair`: mu_learner, prox_theta, theta_reference; `estimator`: k1, k3" in row


def test_the_reference_says_what_stands_only_in_the_step_log() -> None:
    (_, tail) = metrics_catalogue.reference().split("## Only in steps.jsonl")
    assert set(re.findall(r"^\| `(\w+)` \|", tail, re.MULTILINE)) == LEFT_OUT.keys()
