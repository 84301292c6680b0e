"""Defines the study of what LARS is worth, and of weight decay on biases and normalization (Jia et al.)."""

from __future__ import annotations

from hybrid_imagenet.analysis.published import JIA_ABLATION
from hybrid_imagenet.numerics import mlperf
from studies.base import Arm, Claim, Study
from studies.questions import BASE, FACTORS, GPU_IMAGES, GRADUAL, LARGE, lars_points, sgd_points

_LARS = ("--optimizer=lars", f"--lars_eta={mlperf.ETA:g}")
_SGD = ("--optimizer=sgd",)
_SGD_POINTS, _LARS_POINTS = sgd_points(LARGE, FACTORS[1:]), lars_points(LARGE, FACTORS[:4])

DECAY = Study(
    name="decay",
    title="LARS, and weight decay on biases and normalization",
    source="Jia et al., 1.3 (ResNet-50 at a batch of 65,536)",
    statement="LARS lifts the accuracy at a large batch, but not to that of a small one; it gets there once biases and "
    "normalization do not decay.",
    arms=(
        Arm("sgd_all", "SGD, all decay", (*_SGD, "--decay_all"), JIA_ABLATION["none"], points=_SGD_POINTS),
        Arm("lars_all", "LARS, all decay", (*_LARS, "--decay_all"), JIA_ABLATION["LARS"], points=_LARS_POINTS),
        Arm("lars", "LARS, kernels decay", _LARS, points=_LARS_POINTS),
        Arm("sgd", "SGD, kernels decay", _SGD, points=_SGD_POINTS),
    ),
    claims=(Claim("lars_all", "sgd_all"), Claim("lars", "lars_all"), Claim("sgd", "sgd_all", by_paper=False)),
    notes=(
        "All have the same warmup and polynomial decay. With LARS, biases and normalization have the plain rate.",
        f"Batch {LARGE:,} on {LARGE // GPU_IMAGES} virtual GPUs.",
    ),
    base=(*BASE, f"--virtual_gpus={LARGE // GPU_IMAGES}", *GRADUAL, "--lr_schedule=poly"),
)
