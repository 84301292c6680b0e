"""Defines the comparison of optimizers over batches.

Nado et al. (arXiv 2102.06356) found that Nesterov's momentum keeps up with LARS at large batches
when both are tuned under one schedule. So Nesterov, LARS and LAMB here share warmup and polynomial
decay; SGD and hybrid are as in `accuracy-by-batch`, from whose runs they come where these are
there: equal flags are one run.
"""

from __future__ import annotations

from hybrid_imagenet.schedules.relative_step import published_lamb_step
from studies.base import Claim, Point, Study
from studies.questions import BASE, BATCHES, GRADUAL, METHODS, by_batch, sgd_points

POLY = ("--lr_schedule=poly", *GRADUAL)


def lamb_points(batch: int, factors: tuple[float, ...]) -> tuple[Point, ...]:
    """Returns points of LAMB's relative step, which is its learning rate.

    Args:
      batch: Images per update.
      factors: Multiples of the relative step that its authors have at the batch.
    """
    rates = [factor * published_lamb_step(batch) for factor in factors]
    return tuple(Point(f"{rate:.2g}", (f"--lr={rate:.4g}",)) for rate in rates)


def muon_points(batch: int, factors: tuple[float, ...]) -> tuple[Point, ...]:
    """Rates of Muon around its authors' 0.02, at every batch."""
    rates = [0.005 * factor for factor in factors]
    return tuple(Point(f"{rate:.3g}", (f"--lr={rate:.4g}",)) for rate in rates)


OPTIMIZERS = {
    "sgd": METHODS["sgd"],
    "nesterov": (
        "Nesterov, polynomial decay",
        ("--optimizer=sgd", "--sgd_nesterov", *POLY),
        sgd_points,
    ),
    "lars": METHODS["lars"],
    "lamb": ("LAMB, polynomial decay", ("--optimizer=lamb", *POLY), lamb_points),
    "hybrid": METHODS["hybrid"],
    "muon": ("Muon, polynomial decay", ("--optimizer=muon", *POLY), muon_points),
}
"""Label, flags and tuning points of each."""

OPTIMIZERS_BY_BATCH = Study(
    name="optimizers-by-batch",
    title="Optimizers against batch",
    source="",
    statement=(
        "Which optimizer at which batch, each with five points of its rate, in as many epochs?"
    ),
    arms=by_batch(OPTIMIZERS),
    claims=tuple(
        Claim(f"{name}_{batch}", f"nesterov_{batch}", by_paper=False)
        for batch in BATCHES[1:]
        for name in ("lars", "lamb", "muon", "hybrid")
    ),
    notes=(
        (
            "Tuning points are 1/4 to 64 times a published setting: Goyal et al.'s rate over 4"
            " (SGD, Nesterov), the relative step of MLPerf's points (LARS, hybrid), the rate of You"
            " et al. (LAMB), 0.005 (Muon)."
        ),
        (
            "Updates are counted to a share of the training images that are got right while"
            " training, an epoch's mean, between epochs interpolated."
        ),
        (
            "Weight decay and momentum are each optimizer's defaults: 1e-4 in the gradient, 0.01"
            " beside it (LAMB, Muon)."
        ),
    ),
    base=BASE,
)
