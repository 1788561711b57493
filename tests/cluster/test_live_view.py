import io
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from actors.trajectory.account import GroupCosts
from cluster.observing.events import Observer
from cluster.observing.live_view import MIN_REFRESH_S, LiveView, choose_view
from cluster.observing.panels import duration, lag_shares, sparkline
from cluster.observing.plain_view import PlainView
from cluster.observing.view_state import StepSpan
from tests.cluster.made_events import (
    make_actor,
    make_broadcast,
    make_evaluation,
    make_ledger,
    make_queue,
    make_step,
)

DIAGNOSTICS = {"ess_ratio_token_raw": 0.981, "ess_ratio_token_bounded": 0.993}


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def live_view(width: int, clock: Clock, *, terminal: bool = False) -> tuple[LiveView, Console]:
    console = Console(
        file=io.StringIO(), width=width, height=40, force_terminal=terminal, color_system=None
    )
    return LiveView(console, total_steps=80, title="lagwise demo", clock=clock), console


def drawn(view: LiveView, console: Console) -> list[str]:
    with console.capture() as capture:
        console.print(view.render())
    return capture.get().splitlines()


def play(observer: Observer, clock: Clock, steps: int = 12) -> None:
    """A run of some steps, with swaps, readings, an evaluation and messages."""
    observer.on_message("info", "2 rollout actors are ready")
    observer.on_evaluation(make_evaluation(0, success=0.55))
    for number in range(1, steps + 1):
        clock.now_s += 2.0
        observer.on_actors(
            {
                name: make_actor(
                    name, version=number, generated_tokens=1850 * number, idle_s=0.1 * number,
                    alive_s=2.0 * number,
                )
                for name in ("actor-0", "actor-1")
            }
        )  # fmt: skip
        observer.on_queue(
            make_queue(make_ledger(32 * number, {"lag": 4, "engine_error": 1}, queued=20))
        )
        observer.on_step(
            make_step(number, reward=0.5 + 0.01 * number, lag_tokens={0: 20, 1: 60, 2: 15, 3: 5},
                      lag_trajectories={1: 2, 2: 1, 3: 1}, metrics=DIAGNOSTICS)
        )  # fmt: skip
        phases = {"gather": 0.012, "pause": 0.004, "load": 0.021, "verify": 0.006}
        observer.on_broadcast(
            make_broadcast(version=number, phases_s=phases, stall_s=0.031, mismatch=2.4e-6)
        )
    observer.on_evaluation(make_evaluation(steps, success=0.71))
    observer.on_message("warning", "actor-1 skipped version 11: it was still loading version 10")


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_is_legible_in_an_80_by_24_terminal_and_wider(width: int) -> None:
    clock = Clock()
    view, console = live_view(width, clock)
    play(view, clock)
    lines = drawn(view, console)
    text = "\n".join(lines)
    print(text)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 23  # and one line for the prompt
    for shown in (
        *("step 12/80", "0:24", "mean 1.05  max 3", "0.565", "held-out at 12: 0.710"),
        *("5, 12.3 kB, 1.5 s old", "2, in flight 12", "lag 4  engine_error 1", "12 swapped"),
        *("load 21  gather 12", "median 31 ms", "2.4e-06", "raw 0.981  bounded 0.993"),
        *("2 running", "12 to 12", "1,850", "actor-1 skipped version 11"),
    ):
        assert shown in text, shown
    assert "…" not in text


OF_RECIPE = {
    "rejected_fraction": 0.034,
    "rejected_fraction_by_veto": 0.034,
    "kl_k3_theta_reference": 0.01234,
    "entropy": 1.234,
    "value_error_squared": 0.09,
}


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_view_has_room_for_all_that_a_recipe_shows(width: int) -> None:
    clock = Clock()
    view, console = live_view(width, clock)
    play(view, clock)
    before = len(drawn(view, console))
    view.on_step(make_step(13, metrics=DIAGNOSTICS | OF_RECIPE))
    for number in range(3):
        view.on_message("info", f"message {number}")
    lines = drawn(view, console)
    text = "\n".join(lines)
    print(text)
    assert len(lines) == before + 3  # two rows of figures, and the third message
    assert len(lines) <= 23  # and one line for the prompt
    assert all(len(line) <= width for line in lines)
    for shown in ("rejected  3.4 %  kl ref 0.0123", "entropy   1.23  critic err 0.3"):
        assert shown in text, shown
    assert "…" not in text


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        (OF_RECIPE, ["rejected 3.4 %", "kl ref 0.0123", "entropy 1.23", "critic err 0.3"]),
        ({"rejected_fraction": 0.0}, []),
        ({"rejected_fraction": 0.5}, ["rejected 50.0 %"]),
        ({"rejected_fraction": 0.0, "rejected_fraction_by_m2": 0.0}, ["rejected 0.0 %"]),
        ({"kl_k3_theta_reference": 2.0}, ["kl ref 2"]),
        ({"rejected_fraction@lag=1": 0.5, "entropy@lag=1": 1.0}, []),
    ],
)
def test_the_plain_line_tells_only_what_the_recipe_has(
    figures: dict[str, float], told: list[str]
) -> None:
    stream = io.StringIO()
    view = PlainView(stream, total_steps=80, clock=Clock())
    view.on_step(make_step(1, metrics=figures))
    line = "  ".join(["step 1/80  reward 0.50  lag 0.0 (max 0)  reuse 1.0", *told])
    assert stream.getvalue() == line + "\n"


def test_figures_of_several_steps_are_pooled_over_their_tokens() -> None:
    span = StepSpan.of(
        [
            make_step(1, action_tokens=10, metrics={"entropy": 1.0, "value_error_squared": 1.0}),
            make_step(2, action_tokens=30, metrics={"entropy": 2.0, "value_error_squared": 0.0}),
            make_step(3, action_tokens=99, applied=False, metrics={"entropy": 9.0}),
        ]
    )
    assert span.entropy == 1.75
    assert span.critic_error == 0.5  # a mean of squares, then its root
    assert span.rejected is span.kl_reference is None


def test_steps_that_rejected_nothing_count_in_the_share_of_the_rejected() -> None:
    shares = [0.0, 0.0, 0.3]
    span = StepSpan.of(make_step(1, metrics={"rejected_fraction": share}) for share in shares)
    assert span.rejected == pytest.approx(0.1)


def test_a_wider_terminal_gets_a_longer_curve() -> None:
    curves = []
    for width in (80, 120):
        clock = Clock()
        view, console = live_view(width, clock)
        play(view, clock, steps=70)
        curves.append(
            sum(character in "▁▂▃▄▅▆▇" for line in drawn(view, console) for character in line)
        )
    assert curves[0] < curves[1]


TELL: dict[str, Callable[[Observer, int], None]] = {
    "step": lambda observer, n: observer.on_step(make_step(n, reward_parts={"x": 1.0})),
    "all figures": lambda observer, n: observer.on_step(make_step(n, metrics=OF_RECIPE)),
    "odd figures": lambda observer, n: observer.on_step(
        make_step(n, metrics=dict.fromkeys(OF_RECIPE, float("nan")))
    ),
    "empty step": lambda observer, n: observer.on_step(
        make_step(n, trajectories=0, action_tokens=0, lag_tokens={}, lag_trajectories={})
    ),
    "refused step": lambda observer, n: observer.on_step(
        make_step(n, applied=False, reward=float("nan"), gradient_norm=float("nan"))
    ),
    "second pass": lambda observer, n: observer.on_step(make_step(n, reuse_pass=2, passes=2)),
    "late data": lambda observer, n: observer.on_step(
        make_step(n, lag_tokens={n: 3, 1000: 1}, lag_trajectories={1000: 1})
    ),
    "swap": lambda observer, n: observer.on_broadcast(make_broadcast(phases_s={"load": 0.1})),
    "odd phase": lambda observer, n: observer.on_broadcast(make_broadcast(phases_s={"x": 0.1})),
    "failed swap": lambda observer, n: observer.on_broadcast(make_broadcast(outcome="failed")),
    "queue": lambda observer, n: observer.on_queue(make_queue(make_ledger(n, {"lag": n}))),
    "no actors": lambda observer, n: observer.on_actors({}),
    "starting": lambda observer, n: observer.on_actors(
        {"a": make_actor("a", version=None, state="starting", alive_s=0.0)}
    ),
    "actors": lambda observer, n: observer.on_actors(
        {f"a{i}": make_actor(f"a{i}", generated_tokens=n) for i in range(n % 70)}
    ),
    "evaluation": lambda observer, n: observer.on_evaluation(make_evaluation(n)),
    "hostile message": lambda observer, n: observer.on_message(
        "error", "[bold]\x1b[2J\x07two\nlines [/nothing] " + "x" * 300
    ),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(TELL)), st.integers(0, 200)), max_size=25),
    st.sampled_from([20, 40, 80, 120]),
)
def test_no_order_of_events_breaks_a_view(calls: list[tuple[str, int]], width: int) -> None:
    clock = Clock()
    view, console = live_view(width, clock)
    stream = io.StringIO()
    plain = PlainView(stream, total_steps=80, clock=clock, every_s=1.0)
    drawn(view, console)
    for name, number in calls:
        clock.now_s += 0.4
        for observer in (view, plain):
            TELL[name](observer, number)
        lines = drawn(view, console)
        assert all(len(line) <= width for line in lines)
        assert "\x1b" not in "".join(lines)
    plain.close()
    assert "\x1b" not in stream.getvalue()


def test_redraws_at_most_four_times_a_second_and_restores_the_cursor() -> None:
    clock = Clock()
    view, console = live_view(100, clock, terminal=True)
    out = console.file
    assert isinstance(out, io.StringIO)
    with view:
        started = out.getvalue().count("policy lag")
        for _ in range(100):
            clock.now_s += MIN_REFRESH_S / 5
            view.on_queue(make_queue())
        redraws = out.getvalue().count("policy lag") - started
    assert 15 <= redraws <= 21
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")
    view.close()


def test_the_terminal_is_given_back_when_the_run_fails() -> None:
    view, console = live_view(100, Clock(), terminal=True)
    with pytest.raises(RuntimeError, match="the run failed"), view:
        raise RuntimeError("the run failed")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip("\n").endswith("\x1b[?25h")


def test_plain_lines_say_what_happened_since_the_line_before() -> None:
    clock, stream = Clock(), io.StringIO()
    with PlainView(stream, total_steps=80, every_s=10.0, clock=clock) as view:
        play(view, clock)
    lines = stream.getvalue().splitlines()
    print(stream.getvalue())
    assert lines[0] == "2 rollout actors are ready"
    assert lines[1].startswith("evaluation at step 0: success 0.550 (0.450 to 0.650, 64 tasks")
    assert lines[2] == "step 1/80  reward 0.51  lag 1.1 (max 3)  reuse 1.0  queue 5+12  ess 0.98"
    assert lines[3] == (
        "step 5/80  reward 0.54  lag 1.1 (max 3)  reuse 1.0  queue 5+12  ess 0.98"
        "  stall 31 ms  1,850 tok/s"
    )
    assert lines[-2].startswith("warning: actor-1 skipped version 11")
    assert lines[-1].startswith("step 12/80")
    assert all(len(line) <= 110 for line in lines)


def test_plain_lines_come_also_when_no_step_does() -> None:
    clock, stream = Clock(), io.StringIO()
    view = PlainView(stream, total_steps=80, every_s=10.0, clock=clock)
    for _ in range(30):
        clock.now_s += 1.0
        view.on_queue(make_queue())
    assert stream.getvalue() == "step 0/80  no step  queue 5+12\n" * 3


def test_the_share_of_filtered_tokens_shows_where_there_is_one() -> None:
    clock, stream = Clock(), io.StringIO()
    view = PlainView(stream, total_steps=80, every_s=10.0, clock=clock)
    clock.now_s = 10.0
    tokens = make_ledger(trained=300, dropped={"filtered": 100})
    view.on_queue(make_queue(tokens=tokens, filtered={"all_best": GroupCosts(1, 4, 0, 100)}))
    assert stream.getvalue() == "step 0/80  no step  queue 5+12  filtered 25 %\n"


def test_refused_steps_show_in_the_plain_line() -> None:
    stream = io.StringIO()
    view = PlainView(stream, total_steps=80, clock=Clock())
    view.on_step(make_step(0, applied=False, reward=float("nan")))
    assert stream.getvalue() == "step 0/80  no step  1 refused  reuse 0.0\n"


def test_choose_view_by_what_the_stream_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(choose_view(Terminal(), total_steps=1), LiveView)
    assert isinstance(choose_view(io.StringIO(), total_steps=1), PlainView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_view(Terminal(), total_steps=1), PlainView)


def test_sparkline_scales_between_lowest_and_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([3.0, 3.0], 10) == "▁▁"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█"
    assert sparkline([], 10) == ""


def test_lag_rows_join_the_tail_and_keep_the_whole() -> None:
    shares = lag_shares({0: 10, 1: 20, 2: 30, 5: 25, 9: 15}, rows=4)
    assert [label for label, _ in shares] == ["0", "1", "2", "5+"]
    assert sum(share for _, share in shares) == pytest.approx(1.0)
    assert lag_shares({3: 1}, rows=4) == [("3", 1.0)]


def test_durations_read_like_a_clock() -> None:
    assert [duration(s) for s in (0, 61.9, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_views_load_without_heavy_libraries() -> None:
    code = (
        "import sys\n"
        "from cluster.observing import events, exporter, live_view, summary\n"
        "heavy = {'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
