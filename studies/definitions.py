"""Defines the studies: their arms, and the papers' numbers as printed.

Where an epoch of Mikami et al. says when something changes, it is multiplied by EPOCHS / 90. The length T of the
AdaBound warmup of Lu et al. is not: 10 / 90 of so short a training would be a few steps.
"""

from __future__ import annotations

from studies.base import BASE, EPOCHS, Arm, Claim, Study, ranking

_H = "Lu, Lu, Liang, hybrid gradient computing"
_S = "Mikami et al., ImageNet/ResNet-50 in a Flash"
_BEST = 0.756  # final top-1 of the full method of Lu et al., in Tables 3.4 to 3.7
_BEST_EPOCHS = 32  # Lu et al. §3.2.1: epochs to 75 %
_LOW = ("--lr=0.1", "--lars_eta=0.02")
_GRADUAL = ("--warmup_epochs=2.5", "--warmup_start_lr=0.1")

GRADIENT_DESCENT = Study(
    name="gradient_descent",
    title="Gradient descent methods",
    source=f"{_H}, 3.2.1, Fig. 3.1",
    statement="AdaBound warmup + SGD is the most accurate, gradual warmup + SGD second (about 0.5 points less), and "
    "AdaBound last; AdaBound warmup + SGD reaches 75 % sooner than gradual warmup + SGD.",
    arms=(
        Arm("hybrid", "AdaBound warmup + SGD", top1=_BEST, epochs=_BEST_EPOCHS),
        Arm("gradual", "Gradual warmup + SGD", ("--optimizer=sgd", *_GRADUAL), top1=0.751, about=True),
        Arm("adabound", "AdaBound", ("--optimizer=adabound",)),
        Arm("hybrid_low", "AdaBound warmup + SGD, low rate", _LOW),
        Arm("gradual_low", "Gradual warmup + SGD, low rate", ("--optimizer=sgd", *_GRADUAL, _LOW[0])),
    ),
    claims=(*ranking("hybrid", "gradual", "adabound"), Claim("hybrid", "gradual", metric="epochs")),
    notes=(
        "Gradual warmup lasts half as long as the AdaBound warmup (5 and 10 epochs in the papers) and starts at 0.1.",
        "lr * N is 2.4, as in the paper, whose batch is 8 to 16 times larger. The arms with a low rate are not in the "
        "paper: lr * N is 0.2, as linear scaling gives for 2 GPUs, and LARS's coefficient is larger in return.",
        "Each method has a rate that suits it better: the fair comparison is that of the better of its two arms.",
    ),
)

WARMUP_EPOCHS = Study(
    name="warmup_epochs",
    title="Epochs T of the AdaBound warmup",
    source=f"{_H}, 3.2.1, Fig. 3.2",
    statement="T has little effect; a larger T converges slightly faster and ends slightly less accurate.",
    arms=tuple(
        Arm(f"T{epochs}", f"T = {epochs}", () if epochs == 5 else (f"--warmup_epochs={epochs}",))
        for epochs in (5, 2, 8)
    ),
    claims=(
        Claim("T5", "T2", "equal"),
        Claim("T5", "T8", "equal"),
        Claim("T2", "T8"),
        Claim("T8", "T2", metric="epochs"),
    ),
    notes=("The paper shows curves and prints no numbers; its own T is 10 of 90 epochs.",),
)

PRECISION = Study(
    name="precision",
    title="Numerical precision of the gradients",
    source=f"{_H}, 3.2.2, Fig. 3.3",
    statement="The curves of mixed precision and of FP32 almost coincide; that of mixed precision oscillates more.",
    arms=(
        Arm("fp32", "FP32"),
        Arm("fp16", "FP16 computation and exchange", ("--precision=mixed_float16", "--compression=fp16"), _BEST),
        Arm("fp16_wire", "FP32 computation, FP16 exchange", ("--compression=fp16",), 0.7558),
        Arm("bf16", "BF16 computation, FP16 exchange", ("--precision=mixed_bfloat16", "--compression=fp16")),
    ),
    claims=(
        Claim("fp16", "fp32", "equal"),
        Claim("fp16_wire", "fp32", "equal"),
        Claim("fp16", "fp32", metric="oscillation"),
        Claim("bf16", "fp32", "equal", by_paper=False),
        Claim("bf16", "fp32", metric="oscillation", by_paper=False),
    ),
    notes=(
        "FP32 alone has a curve in the paper, but no number. FP32 computation with FP16 exchange is its cluster 2 "
        "(Table 3.7).",
        "FP16 uses dynamic loss scaling. BF16 is not in the paper; it is what a CPU computes in.",
    ),
)


INITIALIZATION = Study(
    name="initialization",
    title="Initialization of convolutions",
    source=f"{_H}, 3.2.3, Table 3.5",
    statement="Kaiming's is the most accurate and reaches 75 % first; then Xavier's, then a Gaussian.",
    arms=(
        Arm("kaiming", "Kaiming", top1=_BEST, epochs=_BEST_EPOCHS),
        Arm("xavier", "Xavier", ("--initializer=xavier",), top1=0.7523, epochs=35),
        Arm("gaussian", "Gaussian", ("--initializer=gaussian",), top1=0.7438, epochs=36),
    ),
    claims=(
        *ranking("kaiming", "xavier", "gaussian"),
        *ranking("kaiming", "xavier", "gaussian", metric="epochs"),
    ),
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
    notes=("resnet10 has four residual blocks where ResNet-50 has 16.",),
)

SONY_SCALE = 128
"""Divides the batches of Mikami et al. in the two studies of their methods: 32K becomes 256."""
_SONY = (
    *BASE,
    "--optimizer=lars",
    "--lr_schedule=sony_a",
    f"--warmup_epochs={34 * EPOCHS / 90:g}",
    "--lars_eta=0.001",
    "--lars_eps=1e-6",
    "--lars_eps_rule=floor",
    "--per_gpu_batch=128",
)
_SMOOTH = "--label_smoothing=0.1"


def growing(*stages: tuple[int, int]) -> str:
    """A batch schedule from (epoch of 90 after which the batch changes, thousands of images as printed)."""
    entries = [f"{epoch * EPOCHS // 90}:{thousands * 1024 // SONY_SCALE // 2}" for epoch, thousands in stages]
    return "--batch_schedule=" + ",".join(entries)


_EXP3 = (growing((0, 54), (30, 64)), _SMOOTH)
_EXP4 = (growing((0, 34), (30, 68), (45, 85), (75, 119)), _SMOOTH)
_SONY_NOTES = (
    f"Batches are those of Mikami et al. divided by {SONY_SCALE}, on 2 ranks; theirs change the number of GPUs too.",
    "All arms have configuration A, its epochs scaled to the length of the run, and momentum 0.9, so that they differ "
    "in batch and label smoothing only. Mikami et al. use configuration B in experiments 2 and 3.",
)

BATCH_SIZE_CONTROL = Study(
    name="batch_size_control",
    title="Batch-size control",
    source=f"{_S}, Tables 3 and 5",
    statement="A batch that grows up to 119K costs little accuracy, and so does 54K with label smoothing; "
    "both together (experiment 3) cost about 0.7 points.",
    arms=(
        Arm("reference", "reference: 32K", top1=0.7540),
        Arm("exp1", "exp. 1: 34K, 68K", (growing((0, 34), (30, 68)),), top1=0.7503),
        Arm("exp2", "exp. 2: 54K, smoothed", (growing((0, 54)), _SMOOTH), top1=0.7529),
        Arm("exp3", "exp. 3: 54K, 64K, smoothed", _EXP3, top1=0.7462),
        Arm("exp4", "exp. 4: 34K to 119K, smoothed", _EXP4, top1=0.7523),
    ),
    claims=(
        Claim("reference", "exp2", "equal"),
        Claim("reference", "exp4", "equal"),
        Claim("reference", "exp3"),
    ),
    notes=_SONY_NOTES,
    base=_SONY,
)

LABEL_SMOOTHING = Study(
    name="label_smoothing",
    title="Label smoothing",
    source=f"{_S}, Table 5",
    statement="With label smoothing the batch can grow from 32K to 54K without significant loss of accuracy.",
    arms=(
        Arm("32K", "32K", top1=0.7540),
        Arm("54K_smoothed", "54K, smoothed", (growing((0, 54)), _SMOOTH), top1=0.7529),
        Arm("54K", "54K", (growing((0, 54)),)),
        Arm("32K_smoothed", "32K, smoothed", (_SMOOTH,)),
    ),
    claims=(Claim("32K", "54K_smoothed", "equal"), Claim("54K_smoothed", "54K", by_paper=False)),
    notes=("Mikami et al. have no training at 54K without label smoothing, nor at 32K with it.", *_SONY_NOTES),
    base=_SONY,
)

STUDIES = {
    study.name: study
    for study in (
        GRADIENT_DESCENT,
        WARMUP_EPOCHS,
        PRECISION,
        INITIALIZATION,
        GAMMA,
        BATCH_SIZE_CONTROL,
        LABEL_SMOOTHING,
    )
}
