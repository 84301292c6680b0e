"""Defines the study of what LARS is worth, and of weight decay on biases and normalization.

Jia et al. leave out that decay.
"""

from __future__ import annotations

from hybrid_imagenet.schedules import mlperf
from studies.base import Arm, Claim, Study
from studies.questions import BASE, FACTORS, GPU_IMAGES, GRADUAL, LARGE, lars_points, sgd_points

_LARS = ("--optimizer=lars", f"--lars_eta={mlperf.ETA:g}")
_SGD = ("--optimizer=sgd",)
JIA_ABLATION = {"none": 0.606, "LARS": 0.719}
"""Jia et al.: top-1 of ResNet-50 at batch 65536 without LARS, and with it while biases and
normalization decay too.

Without that decay it meets the baseline, for which no number is printed at this place.
"""


def _study(name: str, batch: int) -> Study:
    """The study at a batch."""
    sgd, lars = sgd_points(batch, FACTORS[1:]), lars_points(batch, FACTORS[:4])
    return Study(
        name=name,
        title=f"LARS, and weight decay on biases and normalization, batch {batch:,}",
        source="Jia et al., 1.3 (ResNet-50 at a batch of 65,536)",
        statement=(
            "LARS lifts the accuracy at a large batch, but not to that of a small one; it gets"
            " there once biases and normalization do not decay."
        ),
        arms=(
            Arm(
                "sgd_all",
                "SGD, all decay",
                (*_SGD, "--decay_all"),
                JIA_ABLATION["none"],
                points=sgd,
            ),
            Arm(
                "lars_all",
                "LARS, all decay",
                (*_LARS, "--decay_all"),
                JIA_ABLATION["LARS"],
                points=lars,
            ),
            Arm("lars", "LARS, kernels decay", _LARS, points=lars),
            Arm("sgd", "SGD, kernels decay", _SGD, points=sgd),
        ),
        claims=(
            Claim("lars_all", "sgd_all"),
            Claim("lars", "lars_all"),
            Claim("sgd", "sgd_all", by_paper=False),
        ),
        notes=(
            (
                "All have the same warmup and polynomial decay. With LARS, biases and normalization"
                " have the plain rate."
            ),
            f"Batch {batch:,} on {batch // GPU_IMAGES} virtual GPUs.",
        ),
        base=(*BASE, f"--virtual_gpus={batch // GPU_IMAGES}", *GRADUAL, "--lr_schedule=poly"),
    )


DECAY, DECAY_2048 = _study("decay", LARGE), _study("decay-2048", 2 * LARGE)
