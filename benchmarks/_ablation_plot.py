"""The plot of the lag ablation: success and collapse against the lag that was there.

The same rows give the same bytes: no date, and ids from a fixed salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._ablation_page import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vPX*"


def plot(rows: Sequence[Row], start_success: float | None, path: Path) -> None:
    """Write an SVG of two panels, a line a method; bars reach from lowest to highest seed.

    start_success: held-out success of the start policy, a dashed line.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "lag_ablation", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        success, collapse = figure.subplots(1, 2)
        for method, marker in zip(dict.fromkeys(row.method for row in rows), MARKERS, strict=False):
            mine = [row for row in rows if row.method == method and row.lag_mean]
            _success(success, mine, method, marker)
            _collapse(collapse, mine, method, marker)
        if start_success is not None:
            success.axhline(start_success, color="grey", linestyle="--", linewidth=0.8)
        for axes, label in ((success, "held-out success"), (collapse, "share of runs collapsed")):
            axes.set(xlabel="policy lag, mean (versions)", ylabel=label, ylim=(-0.03, 1.03))
            axes.grid(alpha=0.3)
        figure.legend(*success.get_legend_handles_labels(), loc="outside upper center", ncols=6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _success(axes: Axes, rows: Sequence[Row], method: str, marker: str) -> None:
    points = [(row.lag_mean.mean, row.success) for row in rows if row.lag_mean and row.success]
    axes.errorbar(
        [lag for lag, _ in points],
        [spread.mean for _, spread in points],
        yerr=[
            [spread.mean - spread.low for _, spread in points],
            [spread.high - spread.mean for _, spread in points],
        ],
        marker=marker,
        markersize=4,
        linewidth=1.2,
        elinewidth=0.6,
        label=method,
    )


def _collapse(axes: Axes, rows: Sequence[Row], method: str, marker: str) -> None:
    axes.plot(
        [row.lag_mean.mean for row in rows if row.lag_mean],
        [row.collapsed / row.runs for row in rows if row.lag_mean],
        marker=marker,
        markersize=4,
        linewidth=1.2,
        label=method,
    )
