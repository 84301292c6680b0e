"""Defines the studies that ask what the hybrid method is worth at a large batch, on Fashion-MNIST.

Training uses a quarter of the images, and each batch is a quarter of the batch that it represents,
because a study with all 60,000 images would take a day on two cores. Each arm is tuned over the
relative step of LARS, or the effective rate of SGD, with the same number of runs, on the other
training images. It is then reported on the 10,000 test images with new seeds. A GPU is a virtual
one of 32 images. In 16 epochs, T = 3 and kappa = 0.67 keep two properties of 90 epochs with
T = 10 and 0.9: the sum of all rates after T is that of T epochs at the peak, and the last one is
under 1 % of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hybrid_imagenet.schedules import mlperf
from studies.base import Arm, Claim, Point, Study

GPU_IMAGES = 32
EPOCHS, WARMUP, KAPPA = 16, 3, 0.67
# Training images, of 60,000, that are held out for tuning.
TUNING = 47500
MOMENTUM = 0.9
BASE = (
    "--dataset=fashion_mnist",
    f"--tuning_split={TUNING}",
    "--augmentation=shift",
    "--model=resnet8",
    "--model_width=16",
    "--stem=3x3_stride2",
    "--image_size=28",
    "--precision=float32",
    "--compression=none",
    f"--per_gpu_batch={GPU_IMAGES}",
    "--eval_batch=1000",
    f"--epochs={EPOCHS}",
    f"--eval_every_epochs={EPOCHS}",
    f"--warmup_epochs={WARMUP}",
    f"--lr_decay={KAPPA}",
    "--target_top1=0.9",
)
"""For one rank. The learning rate of hybrid is 0.1 for each GPU, as in Lu et al."""

FACTORS = (0.25, 1.0, 4.0, 16.0, 64.0)
"""Tuning points: of the relative step that MLPerf's points have at the batch, or of SGD's
linear-scaling rate.
"""


def gpus(batch: int) -> tuple[str, ...]:
    """The flag that makes one rank stand for the GPUs of a batch."""
    return (f"--virtual_gpus={batch // GPU_IMAGES}",)


def eta(step: float, rate: float, gradient_factor: float) -> str:
    """Returns the flag for the trust coefficient that gives a relative step at a rate.

    `gradient_factor` is the `factor` of `schedules.relative_step.relative_step`.
    """
    return f"--lars_eta={step * (1 - MOMENTUM) / (rate * gradient_factor):.4g}"


def hybrid_points(
    batch: int, factors: tuple[float, ...], handover: str = "continuous"
) -> tuple[Point, ...]:
    """Relative steps at T for hybrid, times the one of MLPerf's points at the batch."""
    rate, c = 0.1 * batch / GPU_IMAGES, 1 - MOMENTUM if handover == "continuous" else 1.0
    found = []
    for factor in factors:
        step = factor * mlperf.tuned_step(batch)
        found.append(Point(f"{step:.2g}", (f"--hybrid_handover={handover}", eta(step, rate, c))))
    return tuple(found)


def lars_points(batch: int, factors: tuple[float, ...]) -> tuple[Point, ...]:
    """The same relative steps for LARS with classical momentum, by its rate."""
    steps = [factor * mlperf.tuned_step(batch) for factor in factors]
    rates = [step * (1 - MOMENTUM) / mlperf.ETA for step in steps]
    return tuple(
        Point(f"{step:.2g}", (f"--lr={rate:.4g}",)) for step, rate in zip(steps, rates, strict=True)
    )


def sgd_points(batch: int, factors: tuple[float, ...]) -> tuple[Point, ...]:
    """Returns points of SGD's effective rate, lr / (1 - momentum).

    They lie around that of Goyal et al., 0.1 B / 256 / 0.1.
    """
    rates = [
        factor / 4 * 0.1 * batch / 256 for factor in factors
    ]  # centred below: linear scaling is a high rate here
    return tuple(Point(f"{rate / (1 - MOMENTUM):.3g}", (f"--lr={rate:.4g}",)) for rate in rates)


GRADUAL = ("--lr_scaling=none", "--warmup_start_lr=0")
_LARS = ("--optimizer=lars", f"--lars_eta={mlperf.ETA:g}", *GRADUAL)
_SGD = ("--optimizer=sgd", "--lr_schedule=step", *GRADUAL)
_STEPS = "--lr_steps=" + ",".join(f"{EPOCHS * epoch / 90:.4g}" for epoch in (30, 60, 80))
BATCHES = (64, 256, 1024)
Points = Callable[[int, tuple[float, ...]], tuple[Point, ...]]
Method = tuple[str, tuple[str, ...], Points]
METHODS: dict[str, Method] = {
    "sgd": ("gradual warmup + SGD (Goyal et al.)", (*_SGD, _STEPS), sgd_points),
    "lars": ("LARS, polynomial decay (MLPerf)", (*_LARS, "--lr_schedule=poly"), lars_points),
    "gradual_lars": ("gradual warmup + LARS, kappa", _LARS, lars_points),
    "hybrid": ("hybrid", (), hybrid_points),
}
"""Label, flags and tuning points of each method; a decay by kappa unless the flags say
otherwise.
"""


def by_batch(methods: Mapping[str, Method]) -> tuple[Arm, ...]:
    """An arm for each method at each batch."""
    return tuple(
        Arm(
            f"{name}_{batch}",
            f"{label}, batch {batch:,}",
            (*flags, *gpus(batch)),
            points=points(batch, FACTORS),
            method=label,
            batch=batch,
        )
        for batch in BATCHES
        for name, (label, flags, points) in methods.items()
    )


ACCURACY_BY_BATCH = Study(
    name="accuracy-by-batch",
    title="Accuracy against batch",
    source="",
    statement=(
        "Which method keeps its accuracy as the batch grows, with as many epochs and as large a"
        " batch per GPU?"
    ),
    arms=by_batch(METHODS),
    claims=(
        *(Claim(f"hybrid_{b}", f"sgd_{b}", by_paper=False) for b in BATCHES[1:]),
        *(Claim(f"hybrid_{b}", f"gradual_lars_{b}", by_paper=False) for b in BATCHES[1:]),
        Claim(f"gradual_lars_{BATCHES[-1]}", f"sgd_{BATCHES[-1]}", by_paper=False),
        *(
            Claim(f"{name}_{BATCHES[-1]}", f"{name}_{BATCHES[0]}", "equal", by_paper=False)
            for name in METHODS
        ),
    ),
    notes=(
        (
            "Updates in a run: 3,125 at a batch of 64, 781 at 256 and 195 at 1,024, of 12,500"
            " images in 16 epochs."
        ),
    ),
    base=BASE,
)

LARGE = BATCHES[-1]
WARMUP_METHOD = Study(
    name="warmup-method",
    title="What the AdaBound warmup is worth",
    source="",
    statement=(
        "AdaBound with closing bounds against a linear warmup, with all else equal: T, the rates of"
        " biases and normalization, kappa and the relative step of each layer after T."
    ),
    arms=tuple(
        arm
        for batch in BATCHES[1:]
        for arm in (
            Arm(
                f"adabound_{batch}",
                f"AdaBound warmup, batch {batch:,}",
                (*gpus(batch), "--hybrid_ramp_epochs=0"),
                points=hybrid_points(batch, FACTORS),
            ),
            Arm(
                f"linear_{batch}",
                f"linear warmup, batch {batch:,}",
                (
                    *gpus(batch),
                    "--optimizer=lars",
                    *GRADUAL,
                    f"--lr={0.1 * batch / GPU_IMAGES * (1 - MOMENTUM):.4g}",
                ),
                points=tuple(
                    Point(
                        f"{step:.2g}", (eta(step, 0.1 * batch / GPU_IMAGES * (1 - MOMENTUM), 1.0),)
                    )
                    for step in (factor * mlperf.tuned_step(batch) for factor in FACTORS)
                ),
            ),
        )
    ),
    claims=tuple(
        Claim(f"adabound_{batch}", f"linear_{batch}", by_paper=False) for batch in BATCHES[1:]
    ),
    notes=(
        (
            "An averaged velocity with the rate lr * N and a classical one with (1 - momentum) lr *"
            " N are the same update."
        ),
    ),
    base=BASE,
)
