"""What each run of the lag ablation came to, kept in a file that outlives an interruption.

The rule of collapse was fixed before any run of the grid, though after trials of single cells: a
run has collapsed if it was stopped because something was not finite, or if the upper end of the
95 % interval of its final held-out success lies below the success that its seed started from.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._ablation_grid import Cell

NOT_FINITE = "not finite"
"""Stands in the first cause of a run that was stopped for non-finite steps."""

CLIPPED = "clip_fraction_"
BOUNDED = "weight_changed_fraction"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to. A field is None where nothing of it was observed.

    lag_mean, lag_max: over action tokens, in versions. clipped: share of action tokens that the
    surrogate clipped; bounded: share whose weight a bound changed or set to 0; both and
    ess_raw, ess_bounded are means over steps weighted by tokens. stopped: first cause of a run
    that was stopped as not finite. settings: what the run set beside the demo's configuration.
    """

    cell: Cell
    settings: Mapping[str, object]
    start_success: float | None
    success: float | None
    success_high: float | None
    reward_first: float | None
    reward_last: float | None
    lag_mean: float | None
    lag_max: int | None
    ess_raw: float | None
    ess_bounded: float | None
    clipped: float | None
    bounded: float | None
    training_s: float | None
    wall_s: float
    dropped: Mapping[str, int]
    stopped: str | None
    commit: str
    machine: str
    load: float

    def as_json(self) -> dict[str, Any]:
        """Plain values, the cell flat among them."""
        values = asdict(self)
        return {**values.pop("cell"), **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """The inverse of `as_json`."""
        cell = {name: values[name] for name in Cell.__slots__}
        return cls(Cell(**cell), **{k: v for k, v in values.items() if k not in cell})


def outcome_of(
    cell: Cell,
    summary: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> Outcome:
    """What a run came to. summary, steps: its summary.json and its applied or refused steps.

    provenance: commit, machine and load average. Raises RuntimeError for a run that failed for
    another reason than something not finite: a killed process is no collapse.
    """
    stopped = summary["status"] == "failed"
    if stopped and NOT_FINITE not in summary["first_cause"]:
        raise RuntimeError(summary["first_cause"])
    if not stopped and summary["reason"] != "max_steps":
        raise RuntimeError(f"ended after {summary['steps']} steps: {summary['reason']}")
    start = next((e for e in summary["evaluation"] if e["policy_version"] == 0), None)
    end = next((e for e in summary["evaluation"] if e["policy_version"] > 0), None)
    return Outcome(
        cell=cell,
        settings=cell.settings(),
        start_success=start and start["success"],
        success=end and end["success"],
        success_high=end and end["high"],
        reward_first=summary["reward"]["first"],
        reward_last=summary["reward"]["last"],
        lag_mean=summary["policy_lag"]["mean"],
        lag_max=summary["policy_lag"]["max"],
        ess_raw=summary["ess_ratio"]["raw"],
        ess_bounded=summary["ess_ratio"]["bounded"],
        clipped=token_mean(steps, lambda name: name.startswith(CLIPPED) and "@" not in name),
        bounded=token_mean(steps, lambda name: name == BOUNDED),
        training_s=training_s(steps),
        wall_s=summary["wall_s"],
        dropped=summary["trajectories"]["dropped"],
        stopped=summary["first_cause"] if stopped else None,
        commit=provenance["commit"],
        machine=provenance["machine"],
        load=provenance["load"],
    )


def token_mean(steps: Sequence[Mapping[str, Any]], chosen: Callable[[str], bool]) -> float | None:
    """Sum of the chosen metrics of a step, as a mean over applied steps weighted by tokens."""
    weighted, tokens = 0.0, 0
    for step in steps:
        values = [value for name, value in step["metrics"].items() if chosen(name)]
        if step["applied"] and values and None not in values:
            weighted += sum(values) * step["action_tokens"]
            tokens += step["action_tokens"]
    return weighted / tokens if tokens else None


def training_s(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds from the first wait for data to the end of the last step."""
    if not steps:
        return None
    began_s: float = steps[0]["at_s"] - steps[0]["step_s"] - steps[0]["wait_s"]
    return float(steps[-1]["at_s"]) - began_s


def start_successes(outcomes: Iterable[Outcome]) -> dict[int, float]:
    """By seed: mean held-out success at version 0 of its runs, which start from one policy."""
    started: dict[int, list[float]] = {}
    for outcome in outcomes:
        if outcome.start_success is not None:
            started.setdefault(outcome.cell.seed, []).append(outcome.start_success)
    return {seed: statistics.mean(values) for seed, values in started.items()}


def collapsed(outcome: Outcome, start_success: float | None) -> bool:
    """The rule of the module docstring. start_success: of the outcome's seed."""
    if outcome.stopped is not None:
        return True
    if outcome.success_high is None or start_success is None:
        return False
    return outcome.success_high < start_success


class OutcomeFile:
    """Outcomes, one JSON object a line, each written when its run has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[Cell, Outcome]:
        """The last outcome of each cell, made with the settings that the cell has now.

        A torn last line is skipped: that run is made again.
        """
        outcomes = {}
        for line in self._path.read_text().splitlines() if self._path.is_file() else []:
            try:
                outcome = Outcome.from_json(json.loads(line))
            except json.JSONDecodeError:
                continue
            if outcome.settings == outcome.cell.settings():
                outcomes[outcome.cell] = outcome
        return outcomes

    def append(self, outcome: Outcome) -> None:
        """Add one; begins a new line even after a torn one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.is_file() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as file:
            file.write("\n" * torn + json.dumps(outcome.as_json(), sort_keys=True) + "\n")
