"""Defines Fig. 3.1 of Lu et al. on Fashion-MNIST.

Hybrid is compared with methods that have its own decay, and with methods that have others. The
rival in the figure, gradual warmup + SGD, has most likely hybrid's decay by kappa; Goyal et al.
have steps. So SGD has kappa, polynomial decay and steps, and LARS has kappa. Five points a factor
of 2 apart lie around the one that was best in the coarser search of `accuracy-by-batch`; AdaBound
was not in it. Three of them came first: for seven of the twelve arms the best of them was the first
or the last.
"""

from __future__ import annotations

from studies.base import Arm, Claim, Point, Study
from studies.questions import (
    BASE,
    BATCHES,
    GRADUAL,
    METHODS,
    gpus,
    hybrid_points,
    lars_points,
    sgd_points,
)

_SGD = ("--optimizer=sgd", *GRADUAL)
_ADAM_RATES = (0.001, 0.004, 0.016, 0.032, 0.064)


def _around(factor: float) -> tuple[float, ...]:
    return factor / 4, factor / 2, factor, 2 * factor, 4 * factor


def _arms(batch: int, sgd: float) -> tuple[Arm, ...]:
    """The methods at a batch; `sgd` is the factor around which SGD's rates lie."""
    rates = sgd_points(batch, _around(sgd))
    methods = (
        ("hybrid", "hybrid", ("--hybrid_ramp_epochs=0",), hybrid_points(batch, _around(16.0))),
        ("sgd_kappa", "gradual warmup + SGD, kappa", _SGD, rates),
        (
            "sgd_poly",
            "gradual warmup + SGD, polynomial decay",
            (*_SGD, "--lr_schedule=poly"),
            rates,
        ),
        ("sgd_steps", METHODS["sgd"][0], METHODS["sgd"][1], rates),
        (
            "lars_kappa",
            METHODS["gradual_lars"][0],
            METHODS["gradual_lars"][1],
            lars_points(batch, _around(4.0)),
        ),
        (
            *("adabound", "AdaBound", ("--optimizer=adabound",)),
            tuple(Point(f"{rate:g}", (f"--adabound_lr={rate:g}",)) for rate in _ADAM_RATES),
        ),
    )
    top1 = {"hybrid": 0.756, "sgd_kappa": 0.751}
    return tuple(
        Arm(
            f"{name}_{batch}",
            f"{label}, batch {batch:,}",
            (*gpus(batch), *flags),
            top1=top1.get(name),
            about=name == "sgd_kappa",
            points=points,
            method=label,
            batch=batch,
        )
        for name, label, flags, points in methods
    )


FIGURE_3_1 = Study(
    name="figure-3-1",
    title="Gradient descent methods by batch",
    source="Lu, Lu, Liang, hybrid gradient computing, 3.2.1, Fig. 3.1",
    statement=(
        "AdaBound warmup + SGD is the most accurate, gradual warmup + SGD second (about 0.5 points"
        " less), and AdaBound last; AdaBound warmup + SGD reaches its target sooner than gradual"
        " warmup + SGD."
    ),
    arms=(*_arms(BATCHES[1], 64.0), *_arms(BATCHES[2], 16.0)),
    claims=tuple(
        claim
        for batch in BATCHES[1:]
        for claim in (
            Claim(f"hybrid_{batch}", f"sgd_kappa_{batch}"),
            Claim(f"sgd_kappa_{batch}", f"adabound_{batch}"),
            Claim(f"hybrid_{batch}", f"sgd_kappa_{batch}", metric="epochs"),
            Claim(f"hybrid_{batch}", f"sgd_poly_{batch}", by_paper=False),
            Claim(f"hybrid_{batch}", f"lars_kappa_{batch}", by_paper=False),
        )
    ),
    notes=(
        (
            "Batch 256 on 8 and 1,024 on 32 virtual GPUs; 16 epochs. Every seed trains on 12,500"
            " images of its own."
        ),
        "The paper's target is 75 %, here it is 80 %.",
    ),
    base=(*BASE, "--target_top1=0.8"),
)
