import torch

from cluster.observing.diagnostic_metrics import (
    ESS_BOUNDED,
    ESS_RAW,
    LAG_BUCKETS,
    METRICS,
    PLACES,
    gauges,
)
from correction import diagnostics, pooling
from correction.bounds import BoundedWeight
from correction.ratios import Level
from correction.surrogates import TokenLosses


def test_every_mapped_diagnostic_is_one_that_the_correction_gives() -> None:
    lag = torch.tensor([[0, 1, 2, 3, 5, 9]])
    ones = torch.ones(lag.shape, dtype=torch.float64)
    no = torch.zeros(lag.shape, dtype=torch.bool)
    view = diagnostics.StepView(
        log_ratios=0.1 * ones,
        to_behaviour=0.2 * ones,
        weight=BoundedWeight(ones, ones, no, no),
        weight_level=Level.TOKEN,
        token=TokenLosses(ones, no, no, no),
        advantages=torch.tensor([1.0]),
        mask=~no,
        lag_versions=lag,
        turn_ids=torch.zeros_like(lag),
    )
    sums = {key: float(total) for key, total in diagnostics.additive_sums(view).items()}
    assert PLACES.keys() <= pooling.summarise(sums).keys()
    assert pooling.LAG_BUCKETS == LAG_BUCKETS


def test_each_diagnostic_has_its_own_place_with_one_value_a_label() -> None:
    labels = {metric.name: metric.labels for metric in METRICS}
    assert len(set(PLACES.values())) == len(PLACES)
    assert {name for name, _ in PLACES.values()} == labels.keys()
    assert all(len(values) == len(labels[name]) for name, values in PLACES.values())


def test_gauges_keep_what_is_known_and_name_what_is_missing() -> None:
    found = gauges({ESS_RAW: 0.5, ESS_BOUNDED: 0.9, "made_up": 1.0})
    assert found["lagwise_ess_ratio"] == {("token", "raw"): 0.5, ("token", "bounded"): 0.9}
    assert found["lagwise_m2"] == {}
    assert found.keys() == {metric.name for metric in METRICS}
