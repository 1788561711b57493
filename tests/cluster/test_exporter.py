import re
import socket
import threading
from collections.abc import Iterator

import pytest

from actors.trajectory.account import GroupCosts
from actors.trajectory.record import DropReason
from cluster.observing.diagnostic_metrics import PLACES
from cluster.observing.exporter import MetricsExporter
from cluster.observing.metrics_catalogue import CATALOGUE
from correction.errors import ConfigError
from tests.cluster.made_events import (
    make_actor,
    make_broadcast,
    make_evaluation,
    make_ledger,
    make_queue,
    make_step,
)
from tests.cluster.scrapes import Scrape, names_of, scrape, value


@pytest.fixture
def exporter() -> Iterator[MetricsExporter]:
    exporter = MetricsExporter(unix_time=lambda: 1000.0)
    yield exporter
    exporter.close()


def test_lag_histograms_count_every_token_and_trajectory_exactly(exporter: MetricsExporter) -> None:
    exporter.on_step(
        make_step(1, lag_tokens={0: 100, 1: 30, 33: 7}, lag_trajectories={1: 3, 33: 1})
    )
    exporter.on_step(make_step(2, lag_tokens={0: 10, 5: 2}, lag_trajectories={5: 2}))
    found = scrape(exporter)
    cumulative = {
        bound: value(found, "token_policy_lag_versions_bucket", le=bound)
        for bound in ("0.0", "1.0", "4.0", "6.0", "32.0", "+Inf")
    }
    assert cumulative == {
        "0.0": 110, "1.0": 140, "4.0": 140, "6.0": 142, "32.0": 142, "+Inf": 149
    }  # fmt: skip
    assert value(found, "token_policy_lag_versions_sum") == 30 + 7 * 33 + 10
    assert value(found, "token_policy_lag_versions_count") == 149
    assert value(found, "trajectory_policy_lag_versions_bucket", le="0.0") == 0
    assert value(found, "trajectory_policy_lag_versions_bucket", le="6.0") == 5
    assert value(found, "trajectory_policy_lag_versions_count") == 6
    assert value(found, "batch_policy_lag_max_versions") == 5
    assert value(found, "batch_policy_lag_mean_versions") == pytest.approx(10 / 12)


def test_lag_of_a_refused_step_is_not_counted_as_used(exporter: MetricsExporter) -> None:
    exporter.on_step(make_step(1, applied=False, lag_tokens={3: 9}, gradient_norm=float("nan")))
    found = scrape(exporter)
    assert value(found, "token_policy_lag_versions_count") == 0
    assert value(found, "steps_total", outcome="refused") == 1
    assert ("lagwise_batch_policy_lag_max_versions", ()) not in found


def test_reuse_is_observed_when_a_batch_retires(exporter: MetricsExporter) -> None:
    exporter.on_step(make_step(1, reuse_pass=1, passes=2, trajectories=4))
    assert value(scrape(exporter), "trajectory_reuse_passes_count") == 0
    exporter.on_step(make_step(2, reuse_pass=2, passes=2, trajectories=4))
    exporter.on_step(make_step(3, reuse_pass=1, passes=1, trajectories=2))
    found = scrape(exporter)
    assert value(found, "trajectory_reuse_passes_bucket", le="1.0") == 2
    assert value(found, "trajectory_reuse_passes_bucket", le="2.0") == 6
    assert value(found, "reuse_mean_passes") == pytest.approx(10 / 6)


def test_bytes_of_heads_are_counted_beside_all_that_was_received(exporter: MetricsExporter) -> None:
    exporter.on_queue(make_queue(received_bytes=0, head_bytes=0))
    assert ("lagwise_queue_head_ratio", ()) not in scrape(exporter)
    exporter.on_queue(make_queue(received_bytes=400, head_bytes=300))
    found = scrape(exporter)
    assert value(found, "queue_received_bytes_total") == 400
    assert value(found, "queue_head_bytes_total") == 300
    assert value(found, "queue_head_ratio") == 0.75


def test_every_metric_of_the_catalogue_can_be_seen_and_nothing_else(
    exporter: MetricsExporter,
) -> None:
    bounded = MetricsExporter(max_lag=4, max_reuse=2, unix_time=lambda: 1000.0)
    every_diagnostic = dict.fromkeys(PLACES, 0.5)
    try:
        bounded.on_step(make_step(1, metrics=every_diagnostic, reward_parts={"answer": 1.0}))
        bounded.on_broadcast(make_broadcast(phases_s={"load": 0.1}))
        kept = {"mixed": GroupCosts(1, 4, 0, 40, 2.0)}
        tokens = make_ledger(queued=40)
        bounded.on_queue(make_queue(tokens=tokens, rejected={"length_mismatch": 1}, kept=kept))
        bounded.on_actors({"actor-0": make_actor()})
        bounded.on_evaluation(make_evaluation())
        found = names_of(scrape(bounded))
    finally:
        bounded.close()
    stems = {re.sub("_(bucket|count|sum)$", "", name) for name in found}
    known = {re.sub("_(bucket|count|sum)$", "", name) for name in CATALOGUE}
    assert stems == known


def test_ledger_closes_in_a_scrape_and_drops_carry_their_reason(exporter: MetricsExporter) -> None:
    exporter.on_queue(
        make_queue(
            make_ledger(trained=7, dropped={"lag": 2, "engine_error": 1}, queued=3, in_flight=4),
            make_ledger(trained=70, dropped={"lag": 20}, leased=5),
        )
    )
    found = scrape(exporter)
    for unit, begun in (("trajectories", "issued"), ("tokens", "generated")):
        dropped = [
            value(found, f"{unit}_dropped_total", reason=reason.value) for reason in DropReason
        ]
        opened = [
            value(found, f"{unit}_open", state=state) for state in ("queued", "leased", "in_flight")
        ]
        trained = value(found, f"{unit}_trained_total")
        assert value(found, f"{unit}_{begun}_total") == trained + sum(dropped) + sum(opened)
    assert value(found, "trajectories_dropped_total", reason="lag") == 2
    assert value(found, "trajectories_dropped_total", reason="shutdown") == 0


def test_the_ledger_closes_in_every_scrape_while_events_come(exporter: MetricsExporter) -> None:
    stop = threading.Event()

    def tell() -> None:
        trained = 0
        while not stop.is_set():
            trained += 1
            ledger = make_ledger(trained, {"lag": 2 * trained}, queued=trained % 3)
            exporter.on_queue(make_queue(ledger, ledger))

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        for _ in range(20):
            found = scrape(exporter)
            trained = value(found, "trajectories_trained_total")
            dropped = value(found, "trajectories_dropped_total", reason="lag")
            queued = value(found, "trajectories_open", state="queued")
            assert dropped == 2 * trained
            assert value(found, "trajectories_issued_total") == trained + dropped + queued
    finally:
        stop.set()
        teller.join()


def test_counters_never_fall_when_actors_restart_vanish_and_come_back(
    exporter: MetricsExporter,
) -> None:
    readings = [
        {"a": make_actor("a", generated_tokens=100, tool_calls=9), "b": make_actor("b")},
        {"a": make_actor("a", generated_tokens=30, alive_s=2.0, restarts=1, tool_calls=1)},
        {},
        {"a": make_actor("a", generated_tokens=50, alive_s=4.0, restarts=1, tool_calls=2)},
    ]
    before: Scrape = {}
    for reading, trained in zip(readings, (5, 9, 3, 4), strict=True):
        exporter.on_actors(reading)
        exporter.on_queue(make_queue(make_ledger(trained=trained)))
        found = scrape(exporter)
        counters = {key: v for key, v in found.items() if re.search("_(total|count)$", key[0])}
        assert all(v >= before.get(key, 0.0) for key, v in counters.items())
        assert before.keys() <= counters.keys()
        before = counters
    assert value(before, "actor_sampled_tokens_total") == 150
    assert value(before, "tool_calls_total") == 11
    assert value(before, "trajectories_trained_total") == 9
    assert value(before, "actor_restarts_total") == 1


def test_a_dead_or_absent_replica_vanishes(exporter: MetricsExporter) -> None:
    for name in ("a", "b", "c"):
        exporter.on_broadcast(make_broadcast(name, mismatch=1e-6))
    exporter.on_actors({name: make_actor(name, version=5) for name in ("a", "b", "c")})
    exporter.on_actors({"a": make_actor("a", version=6), "b": make_actor("b", state="dead")})
    found = scrape(exporter)
    for metric in ("lagwise_actor_policy_version", "lagwise_canary_mismatch_nats"):
        replicas = {labels for name, labels in found if name == metric}
        assert replicas == {(("replica", "a"),)}
    assert value(found, "actor_policy_version", replica="a") == 6
    assert value(found, "actors", state="dead") == 1


def test_broadcast_phases_outcomes_and_stall(exporter: MetricsExporter) -> None:
    exporter.on_broadcast(
        make_broadcast(phases_s={"pause": 0.005, "load": 0.2}, stall_s=0.06, size_bytes=270)
    )
    exporter.on_broadcast(make_broadcast("actor-1", outcome="skipped", size_bytes=270))
    found = scrape(exporter)
    assert value(found, "broadcast_outcomes_total", outcome="swapped") == 1
    assert value(found, "broadcast_outcomes_total", outcome="skipped") == 1
    assert value(found, "broadcast_phase_seconds_bucket", phase="load", le="0.1") == 0
    assert value(found, "broadcast_phase_seconds_bucket", phase="load", le="0.25") == 1
    assert value(found, "generation_stall_seconds_count") == 1
    assert value(found, "generation_stall_seconds_sum") == 0.06
    assert value(found, "broadcast_bytes_total") == 270
    assert value(found, "broadcast_last_success_timestamp_seconds") == 1000.0


def test_groups_of_equal_members_and_full_puts_outlive_their_actor(
    exporter: MetricsExporter,
) -> None:
    exporter.on_actors({"a": make_actor("a", full_puts=5, identical_groups=2)})
    exporter.on_actors(
        {"a": make_actor("a", alive_s=1.0, restarts=1, full_puts=1, identical_groups=3)}
    )
    found = scrape(exporter)
    assert value(found, "actor_full_puts_total") == 6
    assert value(found, "identical_groups_total") == 5


def test_phases_of_a_step_are_counted_from_the_start(exporter: MetricsExporter) -> None:
    assert value(scrape(exporter), "learner_phase_seconds_total", phase="score") == 0
    exporter.on_step(make_step(1))
    exporter.on_step(make_step(2))
    found = scrape(exporter)
    assert value(found, "learner_phase_seconds_total", phase="score") == pytest.approx(0.4)
    assert value(found, "learner_phase_seconds_total", phase="forward_backward") == 1.6


def test_idle_shares_are_of_wall_time(exporter: MetricsExporter) -> None:
    exporter.on_step(make_step(1, at_s=12.0, wait_s=1.0, step_s=1.0))
    exporter.on_step(make_step(2, at_s=20.0, wait_s=3.0, step_s=2.0))
    exporter.on_actors({"a": make_actor("a", idle_s=1.0, alive_s=4.0)})
    found = scrape(exporter)
    assert value(found, "idle_ratio", role="learner") == pytest.approx(4 / 10)
    assert value(found, "idle_ratio", role="actors") == pytest.approx(0.25)


def test_diagnostics_absent_from_the_last_step_are_absent(exporter: MetricsExporter) -> None:
    exporter.on_step(make_step(1, metrics={"ess_ratio_token_raw": 0.9, "m2": 0.1}))
    exporter.on_step(make_step(2, metrics={"ess_ratio_token_raw": 0.8}))
    found = scrape(exporter)
    assert value(found, "ess_ratio", level="token", stage="raw") == 0.8
    assert ("lagwise_m2", ()) not in found


def test_what_a_recipe_has_shows_as_a_whole_and_by_lag(exporter: MetricsExporter) -> None:
    figures = {
        "rejected_fraction_by_veto": 0.125,
        "rejected_fraction_by_veto@lag=3-4": 0.25,
        "kl_k3_theta_reference": 0.5,
        "value_error_squared": 0.75,
        "loss_policy": -1.0,
        "loss_kl": 0.02,
        "zero_variance_group_fraction": 0.375,
    }
    exporter.on_step(make_step(1, metrics=figures))
    found = scrape(exporter)
    assert value(found, "rejected_by_rule_ratio", rule="veto") == 0.125
    assert value(found, "rejected_by_rule_ratio_by_lag", rule="veto", lag="3-4") == 0.25
    assert value(found, "kl_nats", pair="theta_reference", estimator="k3") == 0.5
    assert value(found, "value_error_squared_mean") == 0.75
    assert value(found, "loss_part", part="policy") == -1.0
    assert value(found, "loss_part", part="kl") == 0.02
    assert value(found, "zero_variance_groups_ratio") == 0.375
    exporter.on_step(make_step(2, metrics={"loss_policy": -2.0}))
    later = scrape(exporter)
    gone = {"rejected_by_rule_ratio", "kl_nats", "value_error_squared_mean"}
    assert not {f"lagwise_{name}" for name in gone} & names_of(later)
    parts = {labels for name, labels in later if name == "lagwise_loss_part"}
    assert parts == {(("part", "policy"),)}


def test_two_exporters_in_one_process_do_not_clash(exporter: MetricsExporter) -> None:
    other = MetricsExporter()
    try:
        other.on_message("warning", "only here")
        assert other.port != exporter.port
        assert value(scrape(other), "messages_total", level="warning") == 1
        assert value(scrape(exporter), "messages_total", level="warning") == 0
    finally:
        other.close()


def test_a_taken_port_is_a_configuration_error_that_names_it(exporter: MetricsExporter) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{exporter.port}.*another port"):
        MetricsExporter(port=exporter.port)


def test_listens_on_loopback_only_and_frees_the_port_on_close() -> None:
    exporter = MetricsExporter()
    assert exporter._server.server_address[0] == "127.0.0.1"
    port = exporter.port
    exporter.close()
    exporter.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
