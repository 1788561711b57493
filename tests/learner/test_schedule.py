"""The broadcast schedule, by table and by its optimum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from correction.errors import InputError
from learner.schedule import BroadcastSchedule, Measured, Reason, most_versions


@pytest.mark.parametrize(
    ("since", "busy", "starved", "expected"),
    [
        (0, False, True, Reason.NOTHING_NEW),
        (1, False, False, Reason.NOT_DUE),
        (1, False, True, Reason.STARVED),
        (2, False, False, Reason.DUE),
        (5, True, True, Reason.IN_PROGRESS),
    ],
)
def test_every_two_versions(since: int, busy: bool, starved: bool, expected: Reason) -> None:
    schedule = BroadcastSchedule("every", every_versions=2, most_versions=4)
    reason = schedule.decide(
        versions_since=since, in_progress=busy, starved=starved, measured=Measured()
    )
    assert reason is expected
    assert reason.go == (expected in (Reason.DUE, Reason.STARVED))


@given(cost=st.floats(1e-3, 100), step=st.floats(1e-3, 100), price=st.floats(1e-3, 1))
def test_adaptive_interval_is_the_cheapest_one(cost: float, step: float, price: float) -> None:
    schedule = BroadcastSchedule("adaptive", 1, 1000, price)
    chosen = schedule.interval_versions(Measured(cost, step))

    def total(k: float) -> float:
        return cost / (k * step) + price * (k - 1) / 2

    best = min(range(1, 1001), key=total)
    assert total(chosen) <= 1.1 * total(best) + 1e-12  # rounding of k* costs at most a little


def test_the_lag_bound_limits_the_interval() -> None:
    assert [most_versions(n, 1) for n in (0, 1, 4)] == [1, 2, 5]
    assert most_versions(4, 3) == 3
    schedule = BroadcastSchedule("adaptive", 1, most_versions(2, 1), lag_price=0.01)
    assert schedule.interval_versions(Measured(100.0, 1.0)) == 3


def test_measurements_blend() -> None:
    measured = Measured().with_broadcast(1.0).with_step(2.0)
    assert measured == Measured(1.0, 2.0)
    assert measured.with_broadcast(2.0, weight=0.5).broadcast_s == 1.5


def test_nonsense_is_refused() -> None:
    with pytest.raises(InputError, match="unknown kind"):
        BroadcastSchedule("sometimes")
    with pytest.raises(InputError, match="out of range"):
        BroadcastSchedule(every_versions=0)
