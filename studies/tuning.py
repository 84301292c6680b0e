"""Tunes the arms of a study, each with as many runs, on images and seeds that its report does not
touch.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from studies import trial_runs
from studies.base import Arm, Point, Study
from studies.trial_runs import Cell, Result

SEED = 1000
"""The first of the tuning runs; the reported ones have 0, 1, ..."""
NOT_TUNED = "not tuned yet"
REPORT = ("--eval_split=validation", "--eval_every_epochs=1")
"""Flags of the reported runs."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A tuning run: one point of one arm."""

    arm: Arm
    point: Point
    cell: Cell


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the tuning of an arm found.

    Attributes:
      arm: as the study has it.
      point: the best one on the tuning images; the first where no run has finished.
      top1: by point, in their order, the mean over the seeds; None where a run diverged, failed or
      is missing.
      missing: runs that failed or are missing. Until there are none the arm is not reported: it
        would have had fewer tries than the others.
    """

    arm: Arm
    point: Point
    top1: tuple[float | None, ...]
    missing: int = 0

    @property
    def at_the_end(self) -> bool:
        """Whether the best point is the first or the last in anything that was varied: a wider
        range may be better.
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
    """Every tuning run of a study, seed by seed and point by point, so that one that was cut short
    has all arms.
    """
    longest = max((len(arm.points) for arm in study.arms), default=0)
    return [
        Trial(
            arm,
            point,
            trial_runs.create(root, study.arguments(_at(arm, point), seed, extra), ranks),
        )
        for seed in range(SEED, SEED + study.tuning_seeds)
        for number in range(longest)
        for arm in study.arms
        for point in arm.points[number : number + 1]
    ]


def choose(study: Study, trials: Sequence[Trial], found: Mapping[Cell, Result]) -> list[Choice]:
    """The best point of each arm by the seeds' mean of top-1 on the tuning images at the end of the
    run.
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
        best = max(range(len(top1)), key=lambda i, top1=top1: -1.0 if top1[i] is None else top1[i])  # type: ignore[misc]
        ends = (trial_runs.FINISHED, trial_runs.DIVERGED)
        missing = sum(result.status not in ends for of_point in results for result in of_point)
        choices.append(Choice(arm, arm.points[best], top1, missing))
    return choices


def _mean_top1(results: Sequence[Result]) -> float | None:
    if any(result.status != trial_runs.FINISHED for result in results):
        return None
    return math.fsum(float(result.summary["val_top1"]) for result in results) / len(results)


def reported(study: Study, choices: Sequence[Choice]) -> Study:
    """The study with the chosen point of each arm that is tuned, judged on the validation
    images.
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
    """What stands for the reported runs of an arm that still has points: none of them can be named
    yet.
    """
    return {seed: Result(trial_runs.MISSING, NOT_TUNED) for seed in seeds} if arm.points else {}


def _at(arm: Arm, point: Point, *more: str) -> Arm:
    return dataclasses.replace(arm, flags=(*arm.flags, *point.flags, *more), points=())


def lines(choices: Sequence[Choice], seeds: int = 1) -> list[str]:
    """The tuning as Markdown: what was tried for each arm, how it ended on the tuning images, and
    what was chosen.
    """
    if not choices:
        return []
    runs = " or ".join(map(str, sorted({seeds * len(choice.arm.points) for choice in choices})))
    planned = seeds * sum(len(choice.arm.points) for choice in choices)
    missing = sum(choice.missing for choice in choices)
    drawn = "a seed" if seeds == 1 else f"{seeds} seeds"
    there = f" {planned - missing} of these {planned} runs are there." if missing else ""
    text = [
        "## Tuning",
        "",
        (
            f"{runs} runs for each arm, with {drawn} and without the test images; the best is"
            f" reported.{there}"
        ),
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
