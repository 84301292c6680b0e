"""Defines Fig. 3.1 of Lu et al. at a batch of 1,024 with a whole curve over the rate for each arm.

`figure-3-1` chose each rate by one seed, and `handover` by two, so that they came to different
relative steps for hybrid. Here every rate of every arm has three seeds, and the choice is the top
of a curve fitted to all of them. The tuning runs are in a separate CSV file.

AdaBound's bounds close here as far as on ImageNet. They depend on gamma times the number of the
update, so gamma grows by as much as the run is shorter. `adabound-bounds-256` runs AdaBound alone
with such bounds at a batch of 256, next to the runs of `figure-3-1`. It also runs it with the
bounds of Lu et al.'s warmup, which close at the end of the run.
"""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.schedules import mlperf
from studies.base import Arm, Claim, Point, Study
from studies.figure_3_1 import FIGURE_3_1
from studies.optimizers import OPTIMIZERS
from studies.questions import (
    BASE,
    BATCHES,
    EPOCHS,
    GPU_IMAGES,
    GRADUAL,
    LARGE,
    TUNING,
    gpus,
    hybrid_points,
    sgd_points,
)

ADABOUND_GAMMA = 0.001
"""Luo et al.'s speed at which the bounds close, per update."""
IMAGENET_UPDATES = 90 * mlperf.TRAIN_IMAGES // (24 * 256)
"""Updates of Lu et al.: 90 epochs with 24 GPUs of 256 images."""
UPDATES = EPOCHS * (60_000 - TUNING) // LARGE + 1
"""Updates of a run here."""
FINAL_RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Rates of SGD per GPU at which AdaBound's bounds close; Lu et al. have 0.1."""


def scaled_gamma(updates: int) -> float:
    """Returns the gamma that closes AdaBound's bounds as far in these updates as on ImageNet."""
    return ADABOUND_GAMMA * IMAGENET_UPDATES / updates


def _adabound(
    workers: int, updates: int, rates: tuple[float, ...], flags: tuple[str, ...] = ()
) -> Arm:
    """AdaBound alone; the bounds close on `rates`, the learning rates of SGD for each GPU."""
    return Arm(
        "adabound",
        "AdaBound, bounds that close",
        (*flags, "--optimizer=adabound", f"--adabound_gamma={scaled_gamma(updates):.4g}"),
        points=tuple(Point(f"{rate * workers:.3g}", (f"--lr={rate:g}",)) for rate in rates),
    )


_WORKERS = LARGE // GPU_IMAGES
_ARMS = (
    Arm(
        "hybrid",
        "hybrid",
        ("--hybrid_ramp_epochs=0",),
        top1=0.756,
        points=hybrid_points(LARGE, (4.0, 8.0, 16.0, 32.0, 64.0)),
    ),
    Arm(
        "sgd_kappa",
        "gradual warmup + SGD, kappa",
        ("--optimizer=sgd", *GRADUAL),
        top1=0.751,
        about=True,
        points=sgd_points(LARGE, (4.0, 8.0, 16.0, 32.0, 64.0)),
    ),
    _adabound(_WORKERS, UPDATES, FINAL_RATES),
    Arm(
        "nesterov",
        OPTIMIZERS["nesterov"][0],
        OPTIMIZERS["nesterov"][1],
        points=sgd_points(LARGE, (4.0, 8.0, 16.0, 32.0, 64.0)),
    ),
)

RATE_CURVES = Study(
    name="rate-curves",
    title="Fig. 3.1 at batch 1,024 with a curve over the rate",
    source="Lu, Lu, Liang, hybrid gradient computing, 3.2.1, Fig. 3.1",
    statement=(
        "AdaBound warmup + SGD is the most accurate, gradual warmup + SGD second (about 0.5 points"
        " less), and AdaBound last; AdaBound warmup + SGD reaches its target sooner than gradual"
        " warmup + SGD."
    ),
    arms=_ARMS,
    claims=(
        Claim("hybrid", "sgd_kappa"),
        Claim("sgd_kappa", "adabound"),
        Claim("hybrid", "sgd_kappa", metric="epochs"),
        Claim("hybrid", "adabound", by_paper=False),
        Claim("hybrid", "nesterov", by_paper=False),
    ),
    notes=(
        (
            f"Batch {LARGE:,} on {_WORKERS} virtual GPUs, {UPDATES} updates. Every seed trains on"
            " 12,500 images of its own."
        ),
        (
            f"AdaBound has gamma = {scaled_gamma(UPDATES):.4g} per update, so that its bounds end"
            f" as far from SGD's rate as after ImageNet's {IMAGENET_UPDATES:,} updates with 0.001."
            " The table shows SGD's rate, at which they close. Adam's rate is 0.001."
        ),
        "The paper's target is 75 %, here it is 80 %.",
    ),
    base=(*BASE, "--target_top1=0.8", *gpus(LARGE)),
    tuning_seeds=3,
    race=True,
)

SMALL = BATCHES[1]
SMALL_UPDATES = EPOCHS * (60_000 - TUNING) // SMALL + 1
SMALL_RATES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""The first five are `FINAL_RATES`. The largest of them was best, so two more followed."""
WARMUP_RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Rates of SGD per GPU at which the bounds of Lu et al. close.

Seven came first. The largest of them was best, so three more followed.
"""
_SMALL_WORKERS = SMALL // GPU_IMAGES

ADABOUND_BOUNDS_256 = Study(
    name="adabound-bounds-256",
    title="AdaBound alone with bounds that close, batch 256",
    source="Lu, Lu, Liang, hybrid gradient computing, 3.2.1, Fig. 3.1",
    statement="AdaBound alone is less accurate than gradual warmup + SGD and than hybrid.",
    arms=(
        _adabound(_SMALL_WORKERS, SMALL_UPDATES, SMALL_RATES, gpus(SMALL)),
        Arm(
            "warmup_bounds",
            "AdaBound, bounds of Lu et al.'s warmup",
            (*gpus(SMALL), "--optimizer=hybrid", f"--warmup_epochs={EPOCHS}"),
            points=tuple(
                Point(f"{rate * _SMALL_WORKERS:.3g}", (f"--lr={rate:g}",)) for rate in WARMUP_RATES
            ),
        ),
        *(
            dataclasses.replace(arm, name=arm.name.removesuffix(f"_{SMALL}"))
            for arm in FIGURE_3_1.arms
            if arm.name in (f"hybrid_{SMALL}", f"sgd_kappa_{SMALL}")
        ),
    ),
    claims=tuple(
        Claim(other, arm)
        for arm in ("adabound", "warmup_bounds")
        for other in ("sgd_kappa", "hybrid")
    ),
    notes=(
        (
            f"Batch {SMALL} on {_SMALL_WORKERS} virtual GPUs, {SMALL_UPDATES} updates. Hybrid and"
            " SGD have the flags and the seeds of `figure-3-1`."
        ),
        (
            f"AdaBound has gamma = {scaled_gamma(SMALL_UPDATES):.4g} per update. The table shows"
            " SGD's rate, at which the bounds close. Adam's rate is 0.001."
        ),
        (
            f"The bounds of Lu et al. close at the end of epoch {EPOCHS}, the last one, so no SGD"
            " follows. The table shows the rate at which they close."
        ),
    ),
    base=(*BASE, "--target_top1=0.8"),
)
