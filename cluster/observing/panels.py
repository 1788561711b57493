"""The panels of the live view: from the kept state to rich renderables. Pure.

Drawn for 80 x 24; wider terminals get longer curves and bars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cluster.observing import distributions
from cluster.observing.distributions import Quantiles
from cluster.observing.events import BroadcastEvent, LedgerCounts, QueueStats
from cluster.observing.view_state import RECENT_STEPS, Message, StepSpan, ViewState

SPARKS = "▁▂▃▄▅▆▇█"
LAG_ROWS = 4
NONE = "-"
LEVEL_STYLES = {"warning": "yellow", "error": "bold red"}


def frame(state: ViewState, *, title: str, width: int) -> RenderableType:
    """The whole view for a terminal of `width` columns."""
    half = width // 2
    span = StepSpan.of(state.recent)
    height = 5 + len(_recipe_rows(span))
    return Group(
        _header(state, title),
        _pair(_reward(state, half - 4), _lag(span, half - 4)),
        _pair(_queue(state), _broadcast(state, half - 14)),
        _pair(_learner(state, span, height), _actors(state, height)),
        *(_message(message) for message in state.messages),
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a curve of at most `width` characters, each the mean of a run of values.

    The scale runs from the lowest to the highest mean; equal values give a flat line.
    """
    if not values or width < 1:
        return ""
    columns = min(width, len(values))
    edges = [column * len(values) // columns for column in range(columns + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _pair(left: Panel, right: Panel) -> Table:
    row = Table.grid(expand=True)
    row.add_column(ratio=1)
    row.add_column(ratio=1)
    row.add_row(left, right)
    return row


def _panel(title: str, content: RenderableType, height: int) -> Panel:
    return Panel(
        content, title=title, title_align="left", box=box.ROUNDED, height=height, padding=(0, 1)
    )


def _fields(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
    for name, value in rows:
        table.add_row(name, Text(value, no_wrap=True, overflow="ellipsis"))
    return table


def _header(state: ViewState, title: str) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    done, total = state.policy_version, max(1, state.total_steps)
    row.add_row(
        Text(title, style="bold", no_wrap=True, overflow="ellipsis"),
        ProgressBar(total=total, completed=min(done, total)),
        Text(f"step {done}/{state.total_steps}  {duration(state.elapsed_s)}"),
    )
    return row


def _reward(state: ViewState, width: int) -> Panel:
    lately = StepSpan.of(state.recent).reward
    lines = [
        Text(f"last {min(len(state.recent), RECENT_STEPS)} steps  {_number(lately, '.3f')}"),
        Text(sparkline(list(state.rewards), width), style="green", no_wrap=True, overflow="crop"),
    ]
    for event in state.evaluations[-2:]:
        lines.append(
            Text(
                f"held-out at {event.version.step}: {event.success:.3f}"
                f" ({event.low:.2f}-{event.high:.2f})",
                no_wrap=True,
                overflow="ellipsis",
            )
        )
    return _panel("reward", Group(*lines), LAG_ROWS + 2)


def _lag(span: StepSpan, width: int) -> Panel:
    title = f"policy lag  mean {_number(span.lag_mean, '.2f')}  max {_number(span.lag_max, 'd')}"
    bars = Table.grid(padding=(0, 1))
    for label, share in lag_shares(span.lag_tokens, LAG_ROWS):
        bar = "█" * round(share * max(1, width - 11))
        bars.add_row(f"{label:>3}", Text(bar, style="cyan"), f"{100 * share:.0f} %")
    return _panel(title, bars, LAG_ROWS + 2)


def lag_shares(lag_tokens: Mapping[int, int], rows: int) -> list[tuple[str, float]]:
    """Share of tokens at each lag, in `rows` rows at most, the last for all that remain."""
    total = sum(lag_tokens.values())
    if total == 0:
        return []
    lags = sorted(lag_tokens)
    shown, rest = (lags, []) if len(lags) <= rows else (lags[: rows - 1], lags[rows - 1 :])
    shares = [(str(lag), lag_tokens[lag] / total) for lag in shown]
    if rest:
        shares.append((f"{rest[0]}+", sum(lag_tokens[lag] for lag in rest) / total))
    return shares


def _queue(state: ViewState) -> Panel:
    stats = state.queue
    if stats is None:
        return _panel("queue and ledger", Text("not read yet", style="dim"), 6)
    return _panel(
        "queue and ledger",
        _fields(
            [
                ("ready", _ready(stats)),
                ("leased", f"{stats.leased_groups}, in flight {stats.in_flight_groups}"),
                ("trained", f"{stats.trajectories.trained:,} of {stats.trajectories.issued:,}"),
                ("dropped", _dropped(stats.trajectories)),
            ]
        ),
        6,
    )


def _ready(stats: QueueStats) -> str:
    """Groups, bytes and age of what waits."""
    age = f", {stats.oldest_age_s:.1f} s old" if stats.ready_groups else ""
    return f"{stats.ready_groups}, {_bytes(stats.queued_bytes)}{age}"


def _dropped(counts: LedgerCounts) -> str:
    reasons = sorted(counts.dropped.items(), key=lambda item: -item[1])
    named = "  ".join(f"{reason} {count:,}" for reason, count in reasons if count)
    return f"{sum(counts.dropped.values()):,}  {named}".rstrip()


def _broadcast(state: ViewState, width: int) -> Panel:
    outcomes = "  ".join(f"{count} {name}" for name, count in sorted(state.outcomes.items()))
    return _panel(
        "broadcast",
        _fields(
            [
                ("engines", outcomes or "none yet"),
                ("phases", _phases(state.swaps, width) or NONE),
                ("stall", _stall(state.swaps)),
                ("canary", _mismatch(state.swaps)),
            ]
        ),
        6,
    )


def _phases(swaps: Iterable[BroadcastEvent], width: int) -> str:
    """Median milliseconds of the recent swaps: the slowest phases, as many as fit."""
    kept: dict[str, Quantiles] = {}
    for event in swaps:
        for phase, seconds in event.phases_s.items():
            kept.setdefault(phase, Quantiles()).add(seconds)
    medians = {phase: values.percentile(50) or 0.0 for phase, values in kept.items()}
    slowest = sorted(medians, key=lambda phase: -medians[phase])
    text = ""
    for phase in slowest:
        longer = f"{text}{phase} {1000 * medians[phase]:.0f}  "
        if len(longer) + 2 > width:
            break
        text = longer
    return f"{text.rstrip()} ms" if text else ""


def _stall(swaps: Sequence[BroadcastEvent]) -> str:
    stalls = Quantiles()
    for event in swaps:
        stalls.add(event.stall_s)
    middle, largest = stalls.percentile(50), stalls.largest
    if middle is None or largest is None:
        return NONE
    return f"median {1000 * middle:.0f} ms, max {1000 * largest:.0f} ms"


def _mismatch(swaps: Sequence[BroadcastEvent]) -> str:
    return f"{max(event.mismatch for event in swaps):.1e} at most" if swaps else NONE


def _learner(state: ViewState, span: StepSpan, height: int) -> Panel:
    step = state.step
    gradient = _number(step.gradient_norm if step else None, ".3f")
    rate = _number(step.learning_rate if step else None, ".1e")
    reuse = distributions.mean(state.reuse.served_so_far())
    ess = f"raw {_number(span.ess_raw, '.3f')}  bounded {_number(span.ess_bounded, '.3f')}"
    return _panel(
        "learner",
        _fields(
            [
                ("ess", ess),
                ("gradient", f"{gradient}  rate {rate}"),
                ("reuse", f"{_number(reuse, '.2f')}  idle {_percent(state.learner.idle_share)}"),
                *_recipe_rows(span),
            ]
        ),
        height,
    )


def _recipe_rows(span: StepSpan) -> list[tuple[str, str]]:
    """What only some recipes have, two figures a row."""
    shown = span.of_recipe()
    return [
        (shown[i][0], "  ".join([shown[i][1], *map(" ".join, shown[i + 1 : i + 2])]))
        for i in range(0, len(shown), 2)
    ]


def _actors(state: ViewState, height: int) -> Panel:
    states = [actor.state for actor in state.actors.values()]
    counts = "  ".join(f"{states.count(name)} {name}" for name in sorted(set(states)))
    versions = [actor.version.step for actor in state.actors.values() if actor.version]
    span = f"{min(versions)} to {max(versions)}" if versions else NONE
    totals = state.fleet.totals
    rate = _number(state.tokens_per_s, ",.0f")
    return _panel(
        "actors",
        _fields(
            [
                ("state", counts or "none yet"),
                ("version", f"{span}  restarts {totals.restarts}"),
                ("tok/s", f"{rate}  idle {_percent(totals.idle_share)}"),
            ]
        ),
        height,
    )


def _message(message: Message) -> Text:
    return Text(
        f"{duration(message.at_s)} {message.text}",
        style=LEVEL_STYLES.get(message.level, ""),
        no_wrap=True,
        overflow="ellipsis",
    )


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f} %"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
