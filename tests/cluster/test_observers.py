import threading
import time
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from cluster.observing.events import (
    ActorStats,
    BroadcastEvent,
    EvaluationEvent,
    Observer,
    QueueStats,
    StepEvent,
)
from cluster.observing.observers import Observers
from tests.cluster.made_events import (
    make_actor,
    make_broadcast,
    make_evaluation,
    make_queue,
    make_step,
)


class Recorder:
    """Notes what it was told; raises in the methods named in `fails_in`."""

    def __init__(self, *fails_in: str) -> None:
        self.fails_in = fails_in
        self.told: list[str] = []
        self.messages: list[str] = []

    def on_step(self, event: StepEvent) -> None:
        self._note("on_step")

    def on_broadcast(self, event: BroadcastEvent) -> None:
        self._note("on_broadcast")

    def on_queue(self, stats: QueueStats) -> None:
        self._note("on_queue")

    def on_actors(self, stats: Mapping[str, ActorStats]) -> None:
        self._note("on_actors")

    def on_evaluation(self, event: EvaluationEvent) -> None:
        self._note("on_evaluation")

    def on_message(self, level: str, text: str) -> None:
        self._note("on_message")
        self.messages.append(f"{level}: {text}")

    def _note(self, method: str) -> None:
        self.told.append(method)
        if method in self.fails_in:
            raise OSError(28, "No space left on device")


METHODS = ("on_step", "on_broadcast", "on_queue", "on_actors", "on_evaluation", "on_message")


def tell(observer: Observer, method: str) -> None:
    match method:
        case "on_step":
            observer.on_step(make_step(1))
        case "on_broadcast":
            observer.on_broadcast(make_broadcast())
        case "on_queue":
            observer.on_queue(make_queue())
        case "on_actors":
            observer.on_actors({"a": make_actor("a")})
        case "on_evaluation":
            observer.on_evaluation(make_evaluation())
        case _:
            observer.on_message("info", "text")


def test_all_are_told_everything_in_order() -> None:
    recorders = [Recorder(), Recorder()]
    observers = Observers(recorders)
    for method in METHODS:
        tell(observers, method)
    assert [recorder.told for recorder in recorders] == [list(METHODS)] * 2


def test_one_that_raises_is_reported_once_and_removed() -> None:
    before, bad, after = Recorder(), Recorder("on_step"), Recorder()
    observers = Observers([before, bad, after])
    for _ in range(3):
        observers.on_step(make_step(1))
    assert bad.told == ["on_step"]
    assert observers.active == (before, after)
    expected = "error: Recorder failed in on_step and is told nothing more: OSError: "
    for other in (before, after):
        assert other.told.count("on_step") == 3
        assert [message.startswith(expected) for message in other.messages] == [True]
        assert "No space left on device" in other.messages[0]


def test_failures_while_reporting_a_failure_end_too() -> None:
    bad = [Recorder("on_step", "on_message"), Recorder("on_message"), Recorder("on_step")]
    good = Recorder()
    observers = Observers([*bad, good])
    observers.on_step(make_step(1))
    assert observers.active == (good,)
    assert len(good.messages) == 3


def test_added_later_is_told_from_then_on() -> None:
    observers = Observers()
    observers.on_step(make_step(1))
    late = Recorder()
    observers.add(late)
    observers.on_step(make_step(2))
    assert late.told == ["on_step"]


class Exclusive(Recorder):
    """Raises when it is told two things at once."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = False

    def _note(self, method: str) -> None:
        assert not self.busy
        self.busy = True
        time.sleep(0.001)  # lets another thread in, were nothing to keep it out
        self.busy = False
        super()._note(method)


def test_two_threads_never_tell_at_once() -> None:
    recorder = Exclusive()
    observers = Observers([recorder])

    def tell_steps() -> None:
        for _ in range(20):
            observers.on_step(make_step(1))

    threads = [threading.Thread(target=tell_steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert observers.active == (recorder,)
    assert len(recorder.told) == 80


@given(
    st.lists(st.lists(st.sampled_from(METHODS), max_size=3), max_size=5),
    st.lists(st.sampled_from(METHODS), max_size=20),
)
def test_no_order_of_failures_reaches_the_run(failing: list[list[str]], calls: list[str]) -> None:
    recorders = [Recorder(*methods) for methods in failing]
    good = Recorder()
    observers = Observers([*recorders, good])
    for method in calls:
        tell(observers, method)
    assert good in observers.active
    failed = len(recorders) + 1 - len(observers.active)
    assert sum(message.startswith("error") for message in good.messages) == failed
