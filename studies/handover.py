"""Defines the studies of the hand-over from AdaBound to LARS: Adam's rate, LARS's step, decay and ramp together.

A first look at 1,024 (four seeds, the same training images, no rule) showed that tuning them one at a time finds
nothing: Adam's rate times N, a quarter to a half of the trust coefficient that suits a cold start, and polynomial decay
belong together. The points below are a star around that: LARS's step from 1/8 to 1, and one change in each of Adam's
rate (down and up), decay and ramp. Two seeds choose, on images that are not reported; fresh seeds compare, as many as
there is time for, whatever they show. The rivals are as `optimizers-by-batch` tuned them.
"""

from __future__ import annotations

import math

from studies.base import Arm, Claim, Point, Study
from studies.optimizers import OPTIMIZERS
from studies.questions import (
    BASE,
    EPOCHS,
    GPU_IMAGES,
    LARGE,
    METHODS,
    WARMUP,
    Points,
    gpus,
    hybrid_points,
    lars_points,
    sgd_points,
)
from studies.tuning import REPORT

ADAM_RATE = 0.001
COLD_START = 16.0
"""The relative step after T that was best with Adam's rate alone, times the one that MLPerf's points have."""
ADAM_RATES = {"a": lambda n: 1.0, "a sqrt(N)": math.sqrt, "a N": float, "2 a N": lambda n: 2.0 * n}
"""Adam's rate over a, by the number of GPUs."""


def point(batch: int, rate: str, step: float, decay: str, ramp: float) -> Point:
    """A hand-over.

    Args:
      batch: images per update.
      rate: a name in `ADAM_RATES`.
      step: LARS's coefficient over the best one of a cold start.
      decay: `exponential` (by kappa) or `poly`.
      ramp: epochs over which LARS comes in.
    """
    factor = ADAM_RATES[rate](batch // GPU_IMAGES)
    return Point(
        f"{rate}, step x {step:g}, {'kappa' if decay == 'exponential' else decay}, ramp {ramp:g}",
        (
            f"--adabound_lr={ADAM_RATE * factor:.4g}",
            *hybrid_points(batch, (step * COLD_START,))[0].flags,
            f"--lr_schedule={decay}",
            f"--hybrid_ramp_epochs={ramp:g}",
        ),
        (factor, step),
    )


def _study(name: str, batch: int, nesterov: float, *notes: str) -> Study:
    """The study at a batch; `nesterov` is the factor that `optimizers-by-batch` chose for it there."""

    def as_tuned(points: Points, factor: float) -> tuple[str, ...]:
        """What `optimizers-by-batch` chose for a rival at this batch among five points, as its report has it."""
        return (*points(batch, (factor,))[0].flags, *REPORT)

    count = batch // GPU_IMAGES
    points = (
        *(point(batch, "a N", step, "poly", 0) for step in (0.5, 0.25, 0.125, 1.0)),
        point(batch, "a sqrt(N)", 0.5, "poly", 0),
        point(batch, "2 a N", 0.5, "poly", 0),
        point(batch, "a N", 0.5, "exponential", 0),
        point(batch, "a N", 0.5, "poly", 2),
    )
    updates = 12500 * EPOCHS // batch + 1
    warmup = round(updates * WARMUP / EPOCHS)
    return Study(
        name=name,
        title=f"The hand-over from AdaBound to LARS, batch {batch:,}",
        source="",
        statement="Can hybrid's warmup keep what it has learned, and is hybrid then better than its rivals at a batch "
        f"of {batch:,}? Adam's rate, LARS's step, decay and ramp are chosen together.",
        arms=(
            Arm("handover", "hybrid, chosen hand-over", points=points),
            Arm("default", "hybrid, today's default", ("--hybrid_ramp_epochs=0", *as_tuned(hybrid_points, COLD_START))),
            Arm("lars", METHODS["lars"][0], (*METHODS["lars"][1], *as_tuned(lars_points, 4.0))),
            Arm("nesterov", OPTIMIZERS["nesterov"][0], (*OPTIMIZERS["nesterov"][1], *as_tuned(sgd_points, nesterov))),
        ),
        claims=tuple(Claim("handover", rival, by_paper=False) for rival in ("default", "lars", "nesterov")),
        notes=(
            f"Batch {batch:,} on {count} virtual GPUs, {updates:,} updates, of which the warmup has {warmup}. "
            "Every seed trains on 12,500 images of its own.",
            *notes,
            "The rivals have the rates that `optimizers-by-batch` chose by factors of 4, on other training images.",
        ),
        base=(*BASE, "--target_top1=0.8", f"--virtual_gpus={count}"),
        tuning_seeds=2,
    )


HANDOVER = _study(
    "handover",
    LARGE,
    16.0,
    f"Adam's rate a is {ADAM_RATE:g}. A step of 1 is the trust coefficient that was best with a: a relative step of "
    "0.94 after T.",
    "The points were placed by a first look, so only the comparison on fresh seeds counts. 24 were planned; for want "
    "of time eight were run, which was settled before any result was read. The number of fresh seeds was set by time, "
    "not by what they showed.",
)
HANDOVER_256 = _study(
    "handover-256",
    256,
    64.0,
    f"Adam's rate a is {ADAM_RATE:g}. A step of 1 is the trust coefficient that was best with a: a relative step of "
    "0.47 after T.",
    "The points are those of the study at 1,024. Seven fresh seeds were planned, three were run for want of time. "
    "The results of two were known when that was settled.",
)

_LAST, _BEFORE = "matched to the last update", "matched to the update before the bounds close"
_MATCHED = (
    ("last_a", "a", 0.05, _LAST),
    ("last_aN", "a N", 0.014, _LAST),
    ("before_aN", "a N", 0.27, _BEFORE),
    ("chosen", "a N", 0.5, "chosen hand-over"),
)
MATCHED = Study(
    name="matched",
    title="LARS begins with updates as large as AdaBound's",
    source="",
    statement="Is LARS's step found without a search if its updates, relative to the weights, are as large as "
    "AdaBound's?",
    arms=tuple(
        Arm(
            name,
            f"{rate}, step x {step:g}: {label}",
            (*gpus(LARGE), *point(LARGE, rate, step, "poly", 0).flags, *REPORT),
        )
        for name, rate, step, label in _MATCHED
    ),
    claims=tuple(Claim("chosen", name, by_paper=False) for name in ("last_a", "last_aN", "before_aN")),
    notes=(
        "One run with each of Adam's rates gave |update| / |weights|, the median over layers. With a it is 0.0099 "
        "after epoch 2 and 0.0075 at T; LARS at 0.5 of a step has 0.077 an epoch later. With a N it is 0.036, 0.0018 "
        "and 0.057: the bounds reach all weights within the last epoch.",
        f"Batch {LARGE:,}, polynomial decay, no ramp. Steps are in units of the best one of a cold start, 0.94.",
    ),
    base=(*BASE, "--target_top1=0.8"),
)
