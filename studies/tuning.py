"""Tunes the arms of a study, each with the same number of runs.

The images and seeds are not those of its report.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from studies import trial_runs
from studies.base import Arm, Point, Study
from studies.trial_runs import Cell, Result

SEED = 1000
"""The first of the tuning runs; the reported ones have 0, 1, ..."""
NOT_TUNED = "not tuned yet"
REPORT = ("--eval_split=validation", "--eval_every_epochs=1")
"""Flags of the reported runs."""
NEAR = 0.03
"""Points whose top-1 is within this of the best one's take part in a race after its first seed.

They are the top of the curve over the rate. Beyond them is a cliff, where training nearly fails.
"""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A tuning run: one point of one arm with one seed."""

    arm: Arm
    point: Point
    cell: Cell
    seed: int = SEED


@dataclasses.dataclass(frozen=True)
class Choice:
    """The point that tuning chose for an arm.

    Attributes:
      arm: Arm of the study.
      point: The best one on the tuning images, or in a race the tried point at which the fitted
        curve is highest; the first where no run has finished.
      top1: By point, in their order, the mean over the seeds; None where a run diverged, failed or
        is missing.
      missing: Runs that failed or are missing. Until there are none the arm is not reported: it
        would have had fewer tries than the others.
      runs: How many each point had, in their order.
    """

    arm: Arm
    point: Point
    top1: tuple[float | None, ...]
    missing: int = 0
    runs: tuple[int, ...] = ()

    @property
    def at_the_end(self) -> bool:
        """Whether the best point is the first or the last in anything that was varied.

        Then a wider range may be better.
        """
        points = self.arm.points
        if not self.point.at:
            return self.point in (points[0], points[-1])
        return any(
            len(set(column)) > 1 and mine in (min(column), max(column))
            for mine, column in zip(
                self.point.at, zip(*(point.at for point in points), strict=True), strict=True
            )
        )


def plan(study: Study, root: pathlib.Path, ranks: int, extra: Sequence[str] = ()) -> list[Trial]:
    """Returns every tuning run of a study, seed by seed and point by point.

    So a tuning that is cut short has all arms.
    """
    longest = max((len(arm.points) for arm in study.arms), default=0)
    return [
        Trial(
            arm,
            point,
            trial_runs.create(root, study.arguments(_at(arm, point), seed, extra), ranks),
            seed,
        )
        for seed in range(SEED, SEED + study.tuning_seeds)
        for number in range(longest)
        for arm in study.arms
        for point in arm.points[number : number + 1]
    ]


def first_stage(study: Study, trials: Sequence[Trial], found: Mapping[Cell, Result]) -> list[Trial]:
    """Returns the tuning runs that are needed whatever the others show.

    These are all, or of a race those of the first seed.
    """
    return [trial for trial in trials if not study.race or trial.seed == SEED]


def second_stage(
    study: Study, trials: Sequence[Trial], found: Mapping[Cell, Result]
) -> list[Trial]:
    """Returns the runs of a race with further seeds: those of points near the best of their arm.

    Args:
      study: Study to which the runs belong.
      trials: All that are planned.
      found: The results of the first stage.
    """
    if not study.race:
        return []
    first = {(t.arm.name, t.point.label): _top1(found[t.cell]) for t in trials if t.seed == SEED}
    best: dict[str, float] = {}
    for (name, _), top1 in first.items():
        if top1 is not None:
            best[name] = max(top1, best.get(name, 0.0))
    later = []
    for trial in trials:
        top1 = first[trial.arm.name, trial.point.label]
        if trial.seed != SEED and top1 is not None and top1 >= best[trial.arm.name] - NEAR:
            later.append(trial)
    return later


def _top1(result: Result) -> float | None:
    if result.status != trial_runs.FINISHED:
        return None
    return float(result.summary["val_top1"])


def choose(study: Study, trials: Sequence[Trial], found: Mapping[Cell, Result]) -> list[Choice]:
    """Returns the best point of each arm.

    It is the best by the seeds' mean of top-1 on the tuning images at the end of the run, or for a
    race by a curve fitted to these means.
    """
    choices = []
    for arm in study.arms:
        if not arm.points:
            continue
        results = [
            [found[t.cell] for t in trials if t.arm == arm and t.point == point]
            for point in arm.points
        ]
        top1 = tuple(map(_mean_top1, results))
        heights = _fitted(results, top1) if study.race else top1
        best = max(
            range(len(heights)),
            key=lambda i, heights=heights: -1.0 if heights[i] is None else heights[i],  # type: ignore[misc]
        )
        ends = (trial_runs.FINISHED, trial_runs.DIVERGED)
        missing = sum(result.status not in ends for of_point in results for result in of_point)
        runs = tuple(map(len, results))
        choices.append(Choice(arm, arm.points[best], top1, missing, runs))
    return choices


def _fitted(
    results: Sequence[Sequence[Result]], top1: Sequence[float | None]
) -> list[float | None]:
    """Returns the height of a parabola at each point that had all seeds, None for the others.

    The parabola is fitted by least squares to the means of these points. They are equal factors
    apart, so it is one over the logarithm of the rate. The largest of several means is often the
    one with the most luck; a curve through all of them is less so. Up to three points are kept as
    they are, because a parabola goes through all of them.

    Args:
      results: Results by point and seed.
      top1: The mean of each point.
    """
    seeds = max(map(len, results))
    known = {
        i: value for i, value in enumerate(top1) if value is not None and len(results[i]) == seeds
    }
    if len(known) > 3:
        places = list(known)
        fit = np.polyfit(places, list(known.values()), 2)
        known = {i: float(np.polyval(fit, i)) for i in places}
    return [known.get(i) for i in range(len(top1))]


def _mean_top1(results: Sequence[Result]) -> float | None:
    if any(result.status != trial_runs.FINISHED for result in results):
        return None
    return math.fsum(float(result.summary["val_top1"]) for result in results) / len(results)


def reported(study: Study, choices: Sequence[Choice]) -> Study:
    """Returns the study with the chosen point of each arm that is tuned.

    It is measured on the validation images.
    """
    points = {choice.arm.name: choice.point for choice in choices if not choice.missing}
    arms = [
        (
            dataclasses.replace(_at(arm, point, *REPORT), chosen=point.label)
            if (point := points.get(arm.name))
            else arm
        )
        for arm in study.arms
    ]
    return dataclasses.replace(study, arms=tuple(arms))


def untuned(arm: Arm, seeds: Iterable[int]) -> dict[int, Result]:
    """Returns placeholders for the reported runs of an arm whose point is not chosen yet."""
    return {seed: Result(trial_runs.MISSING, NOT_TUNED) for seed in seeds} if arm.points else {}


def _at(arm: Arm, point: Point, *more: str) -> Arm:
    return dataclasses.replace(arm, flags=(*arm.flags, *point.flags, *more), points=())


def _rule(choices: Sequence[Choice], seeds: int) -> str:
    """Says how the points were tried and how one was chosen."""
    if any(len(set(choice.runs)) > 1 for choice in choices):
        return (
            f"Every point had one seed, and those within {100 * NEAR:g} points of the best of their"
            f" arm had {seeds}, without the test images. The reported point is the top of a"
            " parabola fitted to the means of the latter; numbers of the others are of one seed."
        )
    runs = " or ".join(map(str, sorted({seeds * len(choice.arm.points) for choice in choices})))
    drawn = "a seed" if seeds == 1 else f"{seeds} seeds"
    return (
        f"{runs} runs for each arm, with {drawn} and without the test images; the best is reported."
    )


def lines(choices: Sequence[Choice], seeds: int = 1) -> list[str]:
    """Returns the tuning as lines of Markdown.

    They say what was tried for each arm, how it ended on the tuning images, and what was chosen.
    """
    if not choices:
        return []
    planned = sum(sum(choice.runs) or seeds * len(choice.arm.points) for choice in choices)
    missing = sum(choice.missing for choice in choices)
    there = f" {planned - missing} of these {planned} runs are there." if missing else ""
    text = [
        "## Tuning",
        "",
        _rule(choices, seeds) + there,
        "",
        "| | tried: top-1 on the tuning images | chosen |",
        "|---|---|---|",
    ]
    for choice in choices:
        tried = "; ".join(
            f"{point.label}: {'-' if top1 is None else f'{100 * top1:.2f} %'}"
            for point, top1 in zip(choice.arm.points, choice.top1, strict=True)
        )
        end = ", at an end of the range: open" if choice.at_the_end else ""
        chosen = NOT_TUNED if choice.missing else f"{choice.point.label}{end}"
        text.append(f"| {choice.arm.label} | {tried} | {chosen} |")
    return [*text, ""]
