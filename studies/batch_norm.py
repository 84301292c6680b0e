"""Defines the comparison of batch normalizations of Lu et al., Table 3.4.

It runs on Fashion-MNIST with 12 virtual GPUs.
"""

from __future__ import annotations

from studies.base import Arm, Study, ranking
from studies.questions import (
    BASE,
    EPOCHS,
    FACTORS,
    GPU_IMAGES,
    KAPPA,
    WARMUP,
    hybrid_points,
)

GPUS = 12
LEAST, MOST = GPU_IMAGES // 2, GPU_IMAGES * 3 // 2
"""Images that a GPU uses in the first row: as many on average as in the others."""
_POINTS = hybrid_points(GPUS * GPU_IMAGES, FACTORS[1:])
_SYNC_MOVING = ("--sync_batch_norm", "--batch_norm=moving")
_LONGER = MOST / GPU_IMAGES
_RANDOM = (
    f"--per_gpu_batch={MOST}",
    f"--random_batch={LEAST}",
    f"--epochs={EPOCHS * _LONGER:g}",
    f"--eval_every_epochs={EPOCHS * _LONGER:g}",
    f"--warmup_epochs={WARMUP * _LONGER:g}",
    f"--lr_decay={KAPPA ** (1 / _LONGER):.4g}",
)
"""A third of the images that are read is left out: epochs are more in return, updates and images
used are the same.
"""

BATCH_NORM = Study(
    name="batch_norm",
    title="Batch normalization over several GPUs",
    source="Lu, Lu, Liang, hybrid gradient computing, 3.2.3, Table 3.4",
    statement=(
        "A fixed batch per GPU, statistics of each GPU alone, and statistics of the last iteration"
        " each help."
    ),
    arms=(
        Arm("last", "fixed batch, independent, last iteration", top1=0.756, points=_POINTS),
        Arm(
            "moving",
            "fixed batch, independent, moving average",
            ("--batch_norm=moving",),
            top1=0.7505,
            points=_POINTS,
        ),
        Arm(
            "sync",
            "fixed batch, synchronized, moving average",
            _SYNC_MOVING,
            top1=0.7335,
            points=_POINTS,
        ),
        Arm(
            "random",
            "random batch, synchronized, moving average",
            (*_SYNC_MOVING, *_RANDOM),
            top1=0.7034,
            points=_POINTS,
        ),
    ),
    claims=ranking("last", "moving", "sync", "random"),
    notes=(
        f"{GPUS} virtual GPUs of {GPU_IMAGES} images; the moving average has momentum 0.9.",
        (
            f"Random batches: at every step each GPU uses {LEAST} to {MOST} images; gradients and"
            " moments are weighted by their number, and the rate is that of the fixed batch. The"
            " images beyond are read and left out: with 1.5 times the epochs, T and kappa to"
            " match, there are as many updates from as many images. The paper does not say what"
            " its random batch is."
        ),
        (
            "With weights by count and statistics of all GPUs it makes no difference which GPU has"
            " which image: what is left of the first row is that the batch of all GPUs varies, by 9"
            " % (standard deviation)."
        ),
    ),
    base=(*BASE, f"--virtual_gpus={GPUS}"),
)
