"""Defines the study of the step that `--recipe=hybrid` uses, next to four times that step.

`figure-3-1` tunes hybrid's relative step and finds 16 times the recipe's at 256 images and 32 times
at 1,024. This study runs the recipe's own step, which follows MLPerf's table, and four times that
step, without tuning, on the images and with the seeds of `figure-3-1`.
"""

from __future__ import annotations

from hybrid_imagenet.schedules import mlperf
from studies.base import Arm, Claim, Study
from studies.questions import BASE, BATCHES, GPU_IMAGES, eta, gpus

FACTOR = 4.0
"""The larger step, as a multiple of the recipe's."""


def _arms(batch: int) -> tuple[Arm, Arm]:
    """The recipe and its larger step at a batch."""
    rate = 0.1 * batch / GPU_IMAGES
    # After the warmup, hybrid averages gradients with the factor 1 - momentum.
    larger = eta(FACTOR * mlperf.tuned_step(batch), rate, 0.1)
    return (
        Arm(
            f"recipe_{batch}",
            f"hybrid, the recipe's step, batch {batch:,}",
            gpus(batch),
            method="hybrid, the recipe's step",
            batch=batch,
        ),
        Arm(
            f"recipe_x4_{batch}",
            f"hybrid, 4 times the recipe's step, batch {batch:,}",
            (*gpus(batch), larger),
            method="hybrid, 4 times the recipe's step",
            batch=batch,
        ),
    )


RECIPE_STEP = Study(
    name="recipe-step",
    title="Hybrid with the step of its recipe",
    source="",
    statement=(
        "How accurate is `--recipe=hybrid` in a short run with a small batch, and does a larger"
        " step help?"
    ),
    arms=tuple(arm for batch in BATCHES[1:] for arm in _arms(batch)),
    claims=tuple(
        Claim(f"recipe_x4_{batch}", f"recipe_{batch}", by_paper=False) for batch in BATCHES[1:]
    ),
    notes=(
        (
            "Batch 256 on 8 and 1,024 on 32 virtual GPUs; 16 epochs. Every seed trains on 12,500"
            " images of its own, the same ones as in `figure-3-1`."
        ),
        "Nothing is tuned. The recipe's trust coefficient is the one that the program derives.",
    ),
    # Nothing is tuned, so the accuracy is reported on the 10,000 test images as in figure-3-1.
    base=("--recipe=hybrid", *BASE, "--target_top1=0.8", "--eval_split=validation"),
)
