"""Defines the study of the hand-over from AdaBound to LARS: Adam's rate, LARS's step, decay and ramp together.

A first look (four seeds, the same training images, no rule) showed that tuning them one at a time finds nothing: Adam's
rate times N, a quarter to a half of the trust coefficient that suits a cold start, and polynomial decay belong
together. The points below are the part of {a, a sqrt(N), a N} x {1/8, 1/4, 1/2, 1} x {kappa, poly} x {0, 2} around
what it showed, and one step beyond where that was an end. The rivals are tuned by factors of 2 around what
`optimizers-by-batch` and `accuracy-by-batch` chose by factors of 4. Two seeds choose, on images that are not reported;
fresh seeds compare, as many as there is time for, whatever they show.
"""

from __future__ import annotations

from studies.base import Arm, Claim, Point, Study
from studies.optimizers import OPTIMIZERS
from studies.questions import BASE, GPU_IMAGES, LARGE, METHODS, hybrid_points, lars_points, sgd_points

GPUS = LARGE // GPU_IMAGES
ADAM_RATE = 0.001
COLD_START = 16.0
"""The relative step after T that was best with Adam's rate alone, times the one that MLPerf's points have."""
_RATES = {0.0: "a", 0.5: "a sqrt(N)", 1.0: "a N", 1.2: "2 a N"}
"""Adam's rate by the power of N = 32 in it."""


def point(power: float, step: float, decay: str, ramp: float) -> Point:
    """A hand-over.

    Args:
      power: of N in Adam's rate.
      step: LARS's coefficient over the best one of a cold start.
      decay: `exponential` (by kappa) or `poly`.
      ramp: epochs over which LARS comes in.
    """
    return Point(
        f"{_RATES[power]}, step x {step:g}, {'kappa' if decay == 'exponential' else decay}, ramp {ramp:g}",
        (
            f"--adabound_lr={ADAM_RATE * GPUS**power:.4g}",
            *hybrid_points(LARGE, (step * COLD_START,))[0].flags,
            f"--lr_schedule={decay}",
            f"--hybrid_ramp_epochs={ramp:g}",
        ),
        (power, step),
    )


_POINTS = (
    *(point(1.0, step, "poly", 0) for step in (0.125, 0.25, 0.5, 1.0)),
    *(point(0.5, step, "poly", 0) for step in (0.25, 0.5, 1.0)),
    point(0.0, 0.5, "poly", 0),
    *(point(1.0, step, "exponential", 0) for step in (0.25, 0.5, 1.0)),
    *(point(1.0, step, "poly", 2) for step in (0.25, 0.5)),
    *(point(1.2, step, "poly", 0) for step in (0.25, 0.5)),
)

HANDOVER = Study(
    name="handover",
    title="The hand-over from AdaBound to LARS",
    source="",
    statement="Can hybrid's warmup keep what it has learned, and is hybrid then better than its rivals at a batch of "
    f"{LARGE:,}? Adam's rate, LARS's step, decay and ramp are chosen together.",
    arms=(
        Arm("handover", "hybrid, chosen hand-over", points=_POINTS),
        Arm(
            "default",
            "hybrid, today's default",
            ("--hybrid_ramp_epochs=0",),
            points=hybrid_points(LARGE, (8.0, 16.0, 32.0)),
        ),
        Arm("lars", METHODS["lars"][0], METHODS["lars"][1], points=lars_points(LARGE, (2.0, 4.0, 8.0))),
        Arm(
            "nesterov",
            OPTIMIZERS["nesterov"][0],
            OPTIMIZERS["nesterov"][1],
            points=sgd_points(LARGE, (8.0, 16.0, 32.0)),
        ),
    ),
    claims=tuple(Claim("handover", rival, by_paper=False) for rival in ("default", "lars", "nesterov")),
    notes=(
        f"Batch {LARGE:,} on {GPUS} virtual GPUs, 195 updates, of which the warmup has 36. Every seed trains on 12,500 "
        "images of its own.",
        f"Adam's rate a is {ADAM_RATE:g}. A step of 1 is the trust coefficient that was best with a: a relative step "
        "of 0.94 after T.",
        "The chosen hand-over is the best of 15 points and each rival of 3, so only the comparison on fresh seeds "
        "counts. Its number of seeds was set by time, not by what they showed.",
    ),
    base=(*BASE, "--target_top1=0.8", f"--virtual_gpus={GPUS}"),
    tuning_seeds=2,
)
