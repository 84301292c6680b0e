"""Divides the time of runs and of steps by cause."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.tools.report.load import Run

CAUSES = {
    "computation": 0,
    "computation and other": 0,
    "input": 1,
    "exposed communication": 2,
    "slowest rank": 3,
    "evaluation": 4,
    "checkpoints": 5,
    "other": 6,
}
"""Causes of time and their colors."""


def run_time(runs: Sequence[Run]) -> list[tuple[str, dict[str, float]]]:
    """Seconds of each run by cause."""
    known = [(run.name, run.summary["time_by_cause"]) for run in runs if run.summary.get("time_by_cause")]
    return [(name, {cause: parts[cause] for cause in CAUSES if cause in parts}) for name, parts in known]


def step_time(runs: Sequence[Run]) -> list[tuple[str, dict[str, float]]]:
    """Milliseconds of an average step after the first epoch, by cause, as far as it was measured."""
    rows = []
    for run in runs:
        records = [r for r in run.steps if r.get("step_seconds") and r.get("epoch", 0) > 1]
        records = records or [r for r in run.steps if r.get("step_seconds")]
        if not records:
            continue
        total = statistics.fmean(r["step_seconds"] for r in records)
        waits = [
            r["data_wait_fraction"] * r["step_seconds"] for r in records if r.get("data_wait_fraction") is not None
        ]
        parts = {
            "input": statistics.fmean(waits) if waits else 0.0,
            "exposed communication": _mean([*records, *run.epochs], "communication_seconds"),
            "slowest rank": _mean([*records, *run.epochs], "slowest_rank_seconds"),
        }
        known = {name: 1e3 * seconds for name, seconds in parts.items() if seconds > 0}
        rows.append((run.name, {"computation and other": 1e3 * total - sum(known.values()), **known}))
    return rows


def _mean(records: Sequence[dict[str, Any]], key: str) -> float:
    values = [r[key] for r in records if r.get(key) is not None]
    return statistics.fmean(values) if values else 0.0
