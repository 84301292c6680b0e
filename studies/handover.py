"""Defines the study of the hand-over from AdaBound to LARS: Adam's rate, LARS's step, decay and ramp together.

A first look (four seeds, the same training images, no rule) showed that tuning them one at a time finds nothing: Adam's
rate times N, a quarter to a half of the trust coefficient that suits a cold start, and polynomial decay belong
together. The points below are a star around that: LARS's step from 1/8 to 1, and one change in each of Adam's rate
(down and up), decay and ramp. Two seeds choose, on images that are not reported; fresh seeds compare, as many as there
is time for, whatever they show. The rivals are as `optimizers-by-batch` tuned them.
"""

from __future__ import annotations

from studies.base import Arm, Claim, Point, Study
from studies.optimizers import OPTIMIZERS
from studies.questions import BASE, GPU_IMAGES, LARGE, METHODS, Points, hybrid_points, lars_points, sgd_points
from studies.tuning import REPORT

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


def _as_tuned(points: Points, factor: float) -> tuple[str, ...]:
    """What `optimizers-by-batch` chose for a rival at this batch among five points, as its report has it."""
    return (*points(LARGE, (factor,))[0].flags, *REPORT)


_POINTS = (
    *(point(1.0, step, "poly", 0) for step in (0.5, 0.25, 0.125, 1.0)),
    point(0.5, 0.5, "poly", 0),
    point(1.2, 0.5, "poly", 0),
    point(1.0, 0.5, "exponential", 0),
    point(1.0, 0.5, "poly", 2),
)

HANDOVER = Study(
    name="handover",
    title="The hand-over from AdaBound to LARS",
    source="",
    statement="Can hybrid's warmup keep what it has learned, and is hybrid then better than its rivals at a batch of "
    f"{LARGE:,}? Adam's rate, LARS's step, decay and ramp are chosen together.",
    arms=(
        Arm("handover", "hybrid, chosen hand-over", points=_POINTS),
        Arm("default", "hybrid, today's default", ("--hybrid_ramp_epochs=0", *_as_tuned(hybrid_points, COLD_START))),
        Arm("lars", METHODS["lars"][0], (*METHODS["lars"][1], *_as_tuned(lars_points, 4.0))),
        Arm("nesterov", OPTIMIZERS["nesterov"][0], (*OPTIMIZERS["nesterov"][1], *_as_tuned(sgd_points, 16.0))),
    ),
    claims=tuple(Claim("handover", rival, by_paper=False) for rival in ("default", "lars", "nesterov")),
    notes=(
        f"Batch {LARGE:,} on {GPUS} virtual GPUs, 196 updates, of which the warmup has 37. Every seed trains on 12,500 "
        "images of its own.",
        f"Adam's rate a is {ADAM_RATE:g}. A step of 1 is the trust coefficient that was best with a: a relative step "
        "of 0.94 after T.",
        "The points were placed by a first look, so only the comparison on fresh seeds counts. 24 were planned; for "
        "want of time eight were run, which was settled before any result was read. The number of fresh seeds was "
        "set by time, not by what they showed.",
        "The rivals have the rates that `optimizers-by-batch` chose by factors of 4, on other training images.",
    ),
    base=(*BASE, "--target_top1=0.8", f"--virtual_gpus={GPUS}"),
    tuning_seeds=2,
)
