"""Flags for the batch, the optimizer and its schedules."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.config.options import option
from hybrid_imagenet.numerics.schedules import SCALINGS


@dataclasses.dataclass(frozen=True)
class Batch:
    """Batch."""

    per_gpu_batch: int = option(
        256,
        "Images per GPU and micro-batch: what batch normalization sees.",
        unit="images",
        minimum=1,
        basic=True,
    )
    virtual_gpus: int = option(
        1,
        "GPUs that each rank stands for: it reads as many batches, normalizes each by itself, and learning rates go by "
        "their number.",
        unit="GPUs",
        minimum=1,
    )
    random_batch: int = option(
        0,
        "Each GPU uses a random number of its images at each step, this many to --per_gpu_batch, and leaves the others "
        "out; gradients and moments are weighted by count, rates stay (Lu et al., Table 3.4, first row). 0 uses all. "
        "Needs --sync_batch_norm.",
        unit="images",
        minimum=0,
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches per update, reduced once.", minimum=1, basic=True)
    batch_schedule: tuple[str, ...] = option(
        (),
        "Batch by epoch (Mikami et al., Table 3): flash_exp1 to flash_exp4, or entries EPOCH:IMAGES, "
        "EPOCH:IMAGESxACCUMULATION or EPOCH:*FACTOR; images are per GPU, epochs count from 0, factors refer to the "
        "first batch.",
    )
    batch_growth: str = option(
        "per_gpu",
        "What a factor of --batch_schedule enlarges: the batch of a GPU, or the number of micro-batches.",
        choices=("per_gpu", "accumulation"),
    )


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Optimizer."""

    optimizer: str = option("hybrid", "Update rule.", basic=True)
    ema_decay: float = option(
        0.0,
        "Keep an exponential moving average of the weights with this decay, and validate it; 0 for none. It is ramped "
        "up: (1 + t) / (10 + t) after t updates, if that is less.",
        minimum=0,
        maximum=0.999999,
    )
    ema_every: int = option(
        1,
        "Steps between two updates of the average of --ema_decay.",
        unit="steps",
        minimum=1,
    )
    gradient_noise_scale: bool = option(
        False, "Estimate how large a batch pays from the gradients of the ranks (McCandlish et al.), once per epoch."
    )


@dataclasses.dataclass(frozen=True)
class Schedules:
    """Schedules."""

    lr: float = option(0.1, "Learning rate before --lr_scaling.", minimum=0, basic=True)
    lr_scaling: str = option(
        "workers",
        "Linear scaling: lr * N (Lu et al.), lr * B / 256 (Goyal et al.), or none.",
        choices=SCALINGS,
    )
    lr_schedule: str = option(
        "exponential",
        "Learning rate after the warmup; sony_a and sony_b fix it throughout, mlperf is MLPerf's table by batch.",
        basic=True,
    )
    warmup_epochs: float = option(
        10.0, "T: epochs of the AdaBound or linear warmup.", unit="epochs", minimum=0, basic=True
    )


@dataclasses.dataclass(frozen=True)
class Optimization(Schedules, Optimizer, Batch):
    """Batch, optimizer and schedules."""
