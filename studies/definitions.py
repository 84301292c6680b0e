"""Defines the studies of single methods of Lu et al. and Mikami et al.

The papers' numbers are as printed.
"""

from __future__ import annotations

import dataclasses

from studies.base import Arm, Claim, Study, ranking
from studies.handover import COLD_START
from studies.questions import BASE, BATCHES, EPOCHS, LARGE, WARMUP, gpus, hybrid_points
from studies.tuning import REPORT

_H = "Lu, Lu, Liang, hybrid gradient computing"
_S = "Mikami et al., ImageNet/ResNet-50 in a Flash"
_BEST = 0.756  # final top-1 of the full method of Lu et al., in Tables 3.4 to 3.7
_BEST_EPOCHS = 32  # Lu et al. §3.2.1: epochs to 75 %


def _hybrid(batch: int) -> tuple[str, ...]:
    """Returns the flags of hybrid with a tuned step at a batch, and of reported runs."""
    return (
        *BASE,
        *gpus(batch),
        "--hybrid_ramp_epochs=0",
        *hybrid_points(batch, (COLD_START,))[0].flags,
        "--target_top1=0.8",
        *REPORT,
    )


_HYBRID = _hybrid(LARGE)
_DEEP = (*_HYBRID, "--model=resnet34", "--model_width=8")
_DEEP_NOTES = (
    (
        "resnet34 has as many residual blocks as ResNet-50, 16. Batch 1,024; the paper's target is"
        " 75 %, here 80."
    ),
)

WARMUP_EPOCHS = Study(
    name="warmup_epochs",
    title="Epochs T of the AdaBound warmup",
    source=f"{_H}, 3.2.1, Fig. 3.2",
    statement=(
        "T has little effect; a larger T converges slightly faster and ends slightly less accurate."
    ),
    arms=tuple(
        Arm(
            f"T{epochs}",
            f"T = {epochs}",
            () if epochs == WARMUP else (f"--warmup_epochs={epochs}",),
        )
        for epochs in (WARMUP, 1, 5)
    ),
    claims=(
        Claim("T3", "T1", "equal"),
        Claim("T3", "T5", "equal"),
        Claim("T1", "T5"),
        Claim("T5", "T1", metric="epochs"),
    ),
    notes=(
        (
            "The paper shows curves and prints no numbers. Its T is 10 of 90 epochs, here"
            f" T = {WARMUP} of {EPOCHS} epochs."
        ),
    ),
    base=_HYBRID,
)

WARMUP_EPOCHS_256 = dataclasses.replace(
    WARMUP_EPOCHS,
    name="warmup-epochs-256",
    title="Epochs T of the AdaBound warmup, batch 256",
    notes=(
        *WARMUP_EPOCHS.notes,
        (
            "At a batch of 1,024 results with equal flags differ by more than the effect. At 256"
            " they differ by about 0.3 points. Every seed draws its own 12,500 training images."
        ),
        (
            "T = 3 has the flags of hybrid in `figure-3-1` at this batch, so it reuses the runs of"
            " that study."
        ),
    ),
    base=_hybrid(BATCHES[1]),
)
"""Repeats `warmup_epochs` at the batch at which equal runs differ least."""

PRECISION = Study(
    name="precision",
    title="Numerical precision of the gradients",
    source=f"{_H}, 3.2.2, Fig. 3.3",
    statement=(
        "The curves of mixed precision and of FP32 almost coincide; that of mixed precision"
        " oscillates more."
    ),
    arms=(
        Arm("fp32", "FP32"),
        Arm(
            "fp16",
            "FP16 computation and exchange",
            ("--precision=mixed_float16", "--compression=fp16"),
            _BEST,
        ),
        Arm("fp16_wire", "FP32 computation, FP16 exchange", ("--compression=fp16",), 0.7558),
        Arm(
            "bf16",
            "BF16 computation, FP16 exchange",
            ("--precision=mixed_bfloat16", "--compression=fp16"),
        ),
    ),
    claims=(
        Claim("fp16", "fp32", "equal"),
        Claim("fp16_wire", "fp32", "equal"),
        Claim("fp16", "fp32", metric="oscillation"),
        Claim("bf16", "fp32", "equal", by_paper=False),
        Claim("bf16", "fp32", metric="oscillation", by_paper=False),
    ),
    notes=(
        (
            "FP32 alone has a curve in the paper, but no number. FP32 computation with FP16"
            " exchange is its cluster 2 (Table 3.7); it needs two ranks or more."
        ),
        "FP16 uses dynamic loss scaling. BF16 is not in the paper; it is what a CPU computes in.",
    ),
    base=_HYBRID,
)

INITIALIZATION = Study(
    name="initialization",
    title="Initialization of convolutions",
    source=f"{_H}, 3.2.3, Table 3.5",
    statement=(
        "Kaiming's is the most accurate and reaches 75 % first; then Xavier's, then a Gaussian."
    ),
    arms=(
        Arm("kaiming", "Kaiming", top1=_BEST, epochs=_BEST_EPOCHS),
        Arm("xavier", "Xavier", ("--initializer=xavier",), top1=0.7523, epochs=35),
        Arm("gaussian", "Gaussian", ("--initializer=gaussian",), top1=0.7438, epochs=36),
    ),
    claims=(
        *ranking("kaiming", "xavier", "gaussian"),
        *ranking("kaiming", "xavier", "gaussian", metric="epochs"),
    ),
    notes=_DEEP_NOTES,
    base=_DEEP,
)

GAMMA = Study(
    name="gamma",
    title="Last normalization scale of a residual block",
    source=f"{_H}, 3.2.3, Table 3.6",
    statement="Starting at 0 improves both accuracy and convergence.",
    arms=(
        Arm("zero", "gamma = 0", top1=_BEST, epochs=_BEST_EPOCHS),
        Arm("one", "gamma = 1", ("--nozero_last_gamma",), top1=0.7532, epochs=42),
    ),
    claims=(*ranking("zero", "one"), *ranking("zero", "one", metric="epochs")),
    notes=_DEEP_NOTES,
    base=_DEEP,
)

FLASH_EPOCHS = 18
"""The least in which the 30th, 45th and 75th of 90 epochs are whole ones."""
FLASH_GPUS = 8
FLASH_SCALE = 1024 // FLASH_GPUS
"""Divides the batches of Mikami et al.: each virtual GPU has as many images as they have thousands
in all.
"""
_SMOOTH = "--label_smoothing=0.1"


def growing(*stages: tuple[int, int]) -> str:
    """Returns a batch schedule.

    Args:
      stages: The epoch of 90 after which the batch changes, and thousands of images as printed.
    """
    entries = [f"{epoch * FLASH_EPOCHS // 90}:{k}" for epoch, k in stages]
    return "--batch_schedule=" + ",".join(entries)


BATCH_SIZE_CONTROL = Study(
    name="batch_size_control",
    title="Batch-size control and label smoothing",
    source=f"{_S}, Tables 3 and 5",
    statement=(
        "A batch that grows up to 119K costs little accuracy, and so does 54K with label smoothing;"
        " both together (experiment 3) cost about 0.7 points."
    ),
    arms=(
        Arm("reference", "reference: 32K", top1=0.7540),
        Arm("exp1", "exp. 1: 34K, 68K", (growing((0, 34), (30, 68)),), top1=0.7503),
        Arm("exp2", "exp. 2: 54K, smoothed", (growing((0, 54)), _SMOOTH), top1=0.7529),
        Arm(
            "exp3", "exp. 3: 54K, 64K, smoothed", (growing((0, 54), (30, 64)), _SMOOTH), top1=0.7462
        ),
        Arm(
            "exp4",
            "exp. 4: 34K to 119K, smoothed",
            (growing((0, 34), (30, 68), (45, 85), (75, 119)), _SMOOTH),
            top1=0.7523,
        ),
        Arm("54K", "54K", (growing((0, 54)),)),
        Arm("32K_smoothed", "32K, smoothed", (_SMOOTH,)),
    ),
    claims=(
        Claim("reference", "exp2", "equal"),
        Claim("reference", "exp4", "equal"),
        Claim("reference", "exp3"),
        Claim("exp2", "54K", by_paper=False),
    ),
    notes=(
        (
            f"Batches are those of Mikami et al. divided by {FLASH_SCALE}, on {FLASH_GPUS} virtual"
            " GPUs; theirs change the number of GPUs too. They have no training at 54K without"
            " label smoothing, nor at 32K with it."
        ),
        (
            "All arms have configuration A, its epochs scaled to the length of the run, and"
            " momentum 0.9, so that they differ in batch and label smoothing only. Mikami et al."
            " use configuration B in experiments 2 and 3."
        ),
    ),
    base=(
        *BASE,
        "--optimizer=lars",
        "--lr_schedule=flash_a",
        f"--epochs={FLASH_EPOCHS}",
        f"--warmup_epochs={34 * FLASH_EPOCHS / 90:g}",
        "--lars_eta=0.001",
        "--lars_eps=1e-6",
        "--lars_eps_rule=floor",
        f"--virtual_gpus={FLASH_GPUS}",
        "--target_top1=0.8",
        *REPORT,
    ),
)

STUDIES = {
    study.name: study
    for study in (
        WARMUP_EPOCHS,
        WARMUP_EPOCHS_256,
        PRECISION,
        INITIALIZATION,
        GAMMA,
        BATCH_SIZE_CONTROL,
    )
}
