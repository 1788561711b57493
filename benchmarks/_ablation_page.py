"""The page of the lag ablation: a table and a plot, written from the cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks._ablation_cells import Outcome, Row, rows_of

PAGE = Path("docs/lag_ablation.md")
IMAGE = Path("docs/images/lag_ablation.svg")
MARK = "<!-- Below this line: written by `python -m benchmarks.lag_ablation`. -->"
"""What stands above it in the page is written by hand."""


def write_page(outcomes: Sequence[Outcome], methods: Sequence[str], lags: Sequence[int]) -> None:
    """Replace what stands below MARK, and the plot. Raises ValueError for a page without MARK."""
    rows = rows_of(outcomes, methods, lags)
    text = PAGE.read_text(encoding="utf-8")
    above, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE}: has no line {MARK}")
    PAGE.write_text(f"{above}{MARK}\n\n{table_of(rows)}\n", encoding="utf-8")
    plot(rows, methods)


def table_of(rows: Sequence[Row]) -> str:
    """A Markdown table, one row a method and lag."""
    lines = [
        "| lag bound | method | realised lag | held-out success | reward, last tenth | collapsed |"
        " ESS ratio, raw |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.lag} | `{row.method}` | {row.lag_mean:.1f} | {_told(row.success)} | "
        f"{_told(row.reward_last)} | {row.collapsed} of {row.seeds} | {row.ess_raw:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def _told(spread: tuple[float, float, float]) -> str:
    mean, low, high = spread
    return f"{mean:.2f} ({low:.2f} to {high:.2f})" if low < high else f"{mean:.2f}"


def plot(rows: Sequence[Row], methods: Sequence[str]) -> None:
    """Held-out success against realised lag, a line a method, bars from lowest to highest seed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "lag_ablation"  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.2))
    for method in methods:
        mine = [row for row in rows if row.method == method]
        means = [row.success[0] for row in mine]
        bars = (
            [row.success[0] - row.success[1] for row in mine],
            [row.success[2] - row.success[0] for row in mine],
        )
        axes.errorbar(
            [row.lag_mean for row in mine], means, yerr=bars, marker="o", capsize=3, label=method
        )
    axes.set_xlabel("policy lag, mean over trained tokens (versions)")
    axes.set_ylabel("held-out success after the run")
    axes.set_ylim(0.0, 1.05)
    axes.legend(loc="lower left", fontsize="small")
    axes.grid(alpha=0.3)
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(IMAGE, metadata={"Date": None})
    pyplot.close(figure)
