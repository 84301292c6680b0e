"""Defines studies, their arms and claims, and the training that all of them vary."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from hybrid_imagenet import config as configuration

MARGIN = 0.003  # 0.3 points: what the papers' effects are measured against


@dataclasses.dataclass(frozen=True)
class Point:
    """A setting that is tried for an arm, before the best one is reported.

    Attributes:
      label: How tables call it.
      flags: What differs from the arm.
      at: Its place, one number for each thing that the points of the arm vary; empty where their
        order says it.
    """

    label: str
    flags: tuple[str, ...]
    at: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the methods that a study compares.

    Attributes:
      name: A word, unique in its study.
      label: How tables and plots call it.
      flags: What differs from the study's base.
      top1: The paper's final top-1 accuracy, a fraction; None where it gives none.
      epochs: The paper's epochs to its target, 75 %; None where it gives none.
      about: The paper gives `top1` in words only, relative to another number.
      points: Settings to tune over; an equal number for all arms of a study, or none.
      chosen: Label of the point that tuning has chosen; empty before and without tuning.
      method, batch: In a study that compares methods over batches: the method's name, and images
        per update.
    """

    name: str
    label: str
    flags: tuple[str, ...] = ()
    top1: float | None = None
    epochs: float | None = None
    about: bool = False
    points: tuple[Point, ...] = ()
    chosen: str = ""
    method: str = ""
    batch: int = 0


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement about two arms, written down before the study runs.

    Attributes:
      first, second: Names of arms.
      relation: `above` (the first is better than the second) or `equal`.
      metric: `top1` (final validation accuracy, more is better), `epochs` (to the target, fewer are
        better) or `oscillation` (of validation accuracy by epoch; `above` says that the first has
        more).
      margin: How far apart two arms that are as good as each other may be, in the metric's unit.
      by_paper: The paper makes the statement; otherwise it is ours, and not judged as the paper's.
    """

    first: str
    second: str
    relation: str = "above"
    metric: str = "top1"
    margin: float = MARGIN
    by_paper: bool = True


@dataclasses.dataclass(frozen=True)
class Study:
    """A comparison that a paper makes, or a question of ours.

    Attributes:
      name: A word.
      title: What is compared.
      source: The paper and its figure or table; empty for a question of ours.
      statement: What the paper says about it, in our words; or the question.
      arms: The methods, the paper's own first.
      claims: What of the statement can be checked.
      notes: How this differs from the paper.
      base: Flags of all arms.
      tuning_seeds: Runs of each tuning point; the best mean is chosen.
      race: After the first tuning seed, points far below the best one get no more seeds, and the
        choice is the top of a curve fitted to the others (see `tuning`).
    """

    name: str
    title: str
    source: str
    statement: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    tuning_seeds: int = 1
    race: bool = False

    def arguments(self, arm: Arm, seed: int, extra: Sequence[str] = ()) -> tuple[str, ...]:
        """Flags of the training program for one cell, without its run directory. Later flags win.

        Options of the base that an arm's optimizer or schedule does not have are left out.
        """
        own = (*arm.flags, f"--seed={seed}", *extra)
        unused = configuration.resolve(own, before=self.base).dropped
        return (
            *(flag for flag in self.base if flag.lstrip("-").partition("=")[0] not in unused),
            *own,
        )


def ranking(*names: str, metric: str = "top1") -> tuple[Claim, ...]:
    """The claims that make an order, best first: each arm is above the next one."""
    return tuple(Claim(better, worse, metric=metric) for better, worse in itertools.pairwise(names))
