"""Defines the studies of the hand-over from AdaBound to LARS.

They tune Adam's rate, LARS's step, decay and ramp together.

A first look at 1,024 (four seeds, the same training images, no rule) showed that tuning them one at
a time finds nothing: Adam's rate times N, a quarter to a half of the trust coefficient that suits a
cold start, and polynomial decay belong together. The points below are a star around that: LARS's
step from 1/8 to 1, and one change in each of Adam's rate (down and up), decay and ramp. Two seeds
choose, on images that are not reported; fresh seeds compare, as many as there is time for, whatever
they show. The rivals are tuned on the same seeds, by factors of 2 around what `optimizers-by-batch`
chose for them; where the largest was best, the range went on.
"""

from __future__ import annotations

import math

from studies.base import Arm, Claim, Point, Study
from studies.optimizers import OPTIMIZERS
from studies.questions import BASE, EPOCHS, GPU_IMAGES, LARGE, METHODS, WARMUP, hybrid_points

ADAM_RATE = 0.001
COLD_START = 16.0
"""The relative step after T that was best with Adam's rate alone, times the one that MLPerf's
points have.
"""
ADAM_RATES = {
    "a": lambda n: 1.0,
    "a sqrt(N)": math.sqrt,
    "a N": float,
    "2 a N": lambda n: 2.0 * n,
    "4 a N": lambda n: 4.0 * n,
    "8 a N": lambda n: 8.0 * n,
}
"""Adam's rate over a, by the number of GPUs."""


def point(batch: int, rate: str, step: float, decay: str, ramp: float) -> Point:
    """A hand-over.

    Args:
      batch: Images per update.
      rate: A name in `ADAM_RATES`.
      step: LARS's coefficient over the best one of a cold start.
      decay: `exponential` (by kappa) or `poly`.
      ramp: Epochs over which LARS comes in.
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


def _study(name: str, batch: int, nesterov: float, more: tuple[Point, ...], *notes: str) -> Study:
    """The study at a batch.

    Args:
      name: Name of the study.
      batch: Images per update.
      nesterov: The middle one of its factors.
      more: Points of this batch alone.
      *notes: Notes on this batch alone.
    """
    rivals = (
        (
            "default",
            "hybrid, the recipe's hand-over, tuned step",
            ("--hybrid_ramp_epochs=0",),
            hybrid_points,
            COLD_START,
        ),
        ("lars", *METHODS["lars"], 4.0),
        ("nesterov", *OPTIMIZERS["nesterov"], nesterov),
    )
    count = batch // GPU_IMAGES
    points = (
        *(point(batch, "a N", step, "poly", 0) for step in (0.5, 0.25, 0.125, 1.0)),
        point(batch, "a sqrt(N)", 0.5, "poly", 0),
        *(point(batch, rate, 0.5, "poly", 0) for rate in ("2 a N", "4 a N")),
        point(batch, "a N", 0.5, "exponential", 0),
        point(batch, "a N", 0.5, "poly", 2),
        *more,
    )
    updates = 12500 * EPOCHS // batch + 1
    warmup = round(updates * WARMUP / EPOCHS)
    return Study(
        name=name,
        title=f"The hand-over from AdaBound to LARS, batch {batch:,}",
        source="",
        statement=(
            "Can hybrid's warmup keep what it has learned, and is hybrid then better than its"
            f" rivals at a batch of {batch:,}? Adam's rate, LARS's step, decay and ramp are chosen"
            " together."
        ),
        arms=(
            Arm("handover", "hybrid, chosen hand-over", points=points),
            *(
                Arm(name, label, flags, points=points_of(batch, (factor / 2, factor, 2 * factor)))
                for name, label, flags, points_of, factor in rivals
            ),
        ),
        claims=tuple(
            Claim("handover", rival, by_paper=False) for rival in ("default", "lars", "nesterov")
        ),
        notes=(
            (
                f"Batch {batch:,} on {count} virtual GPUs, {updates:,} updates, of which the warmup"
                f" has {warmup}. Every seed trains on 12,500 images of its own."
            ),
            *notes,
        ),
        base=(*BASE, "--target_top1=0.8", f"--virtual_gpus={count}"),
        tuning_seeds=2,
    )


HANDOVER = _study(
    "handover",
    LARGE,
    32.0,
    (),
    f"Adam's rate a is {ADAM_RATE:g}. A step of 1 is the trust coefficient that was best with a: a"
    " relative step of 0.94 after T.",
    "The points were placed by a first look, so only the comparison on fresh seeds counts. 15 are"
    " planned. The results of seven were known before, against rivals tuned by factors of 4.",
)
HANDOVER_256 = _study(
    "handover-256",
    256,
    128.0,
    (point(256, "8 a N", 0.5, "poly", 0),),
    f"Adam's rate a is {ADAM_RATE:g}. A step of 1 is the trust coefficient that was best with a: a"
    " relative step of 0.47 after T.",
    "The points are those at 1,024, and 8 a N. Ten fresh seeds are planned. The results of three"
    " were known before, against rivals tuned by factors of 4.",
)
