"""Flags for the batch, the optimizer and its schedules."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.config.options import option


@dataclasses.dataclass(frozen=True)
class Batch:
    """Batch."""

    per_gpu_batch: int = option(
        256,
        "Images per GPU and micro-batch: what batch normalization sees. auto tries batches at the start and takes the "
        "largest that fits the memory of every rank.",
        unit="images",
        minimum=1,
        auto=True,
    )
    memory_limit_gb: float | None = option(
        None,
        "With --per_gpu_batch=auto, the memory of a rank's step; default the GPU's, or on CPUs 80 % of what the host "
        "has free, divided by its ranks.",
        unit="GB",
        minimum=0.01,
    )
    accumulation: int = option(1, "Micro-batches per update, reduced once.", minimum=1)
    batch_schedule: tuple[str, ...] = option(
        (),
        "Batch by epoch (S Table 3): flash_exp1 to flash_exp4, or entries EPOCH:IMAGES, EPOCH:IMAGESxACCUMULATION or "
        "EPOCH:*FACTOR; images are per GPU, epochs count from 0, factors refer to the first batch.",
    )
    batch_growth: str = option(
        "per_gpu",
        "What a factor of --batch_schedule enlarges: the batch of a GPU, or the number of micro-batches.",
        choices=("per_gpu", "accumulation"),
    )


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Optimizer."""

    optimizer: str = option("hybrid", "Update rule.", choices=("hybrid", "adabound", "sgd", "lars"))
    momentum: float = option(0.9, "Momentum of SGD (G; H's steps show none: 0).", minimum=0, maximum=0.9999)
    nesterov: bool = option(False, "Nesterov's momentum in MLPerf's form (sgd and lars).")
    weight_decay: float = option(1e-4, "Coupled L2 decay.", minimum=0)
    decay_in_warmup: bool = option(False, "Decay in the AdaBound warmup too (H: in SGD).")
    decay_all: bool = option(False, "Decay biases and normalization parameters too (J leaves them out).")
    adabound_lr: float = option(1e-3, "alpha: learning rate of Adam inside AdaBound.", minimum=0)
    adabound_lr_scaling: bool = option(False, "Multiply alpha by N.")
    adabound_beta1: float = option(0.9, "Decay of the first moment.", minimum=0, maximum=0.999999)
    adabound_beta2: float = option(0.999, "Decay of the second moment.", minimum=0, maximum=0.999999)
    adabound_eps: float = option(1e-8, "Added to sqrt(v).", minimum=0)
    adabound_gamma: float = option(1e-3, "How fast the bounds of --optimizer=adabound close, per step.", minimum=0)
    amsbound: bool = option(False, "Keep the largest second moment (--optimizer=adabound).")
    bias_correction: bool = option(True, "Correct Adam's step for bias (H prints none).")
    bound_time: str = option("fractional", "t in H's bounds.", choices=("fractional", "epoch"))
    handover: str = option(
        "continuous",
        "The velocity at T: averaged on as AdaBound did, with no jump in the size of the update; zero; or as if SGD "
        "with momentum had run before.",
        choices=("continuous", "reset", "rescale"),
    )
    lars: str = option(
        "you", "Rates per layer for hybrid and lars: You et al., LARC's clip, or none.", choices=("you", "larc", "none")
    )
    lars_eta: float = option(0.001, "Trust coefficient (S states 0.01, LARC 0.02).", minimum=0)
    lars_eps: float = option(0.0, "Guard of the ratio's denominator.", minimum=0)
    lars_eps_rule: str = option(
        "add", "Add eps (MLPerf), or replace smaller denominators by it (S).", choices=("add", "floor")
    )
    ema_decay: float = option(
        0.0,
        "Keep an exponential moving average of the weights with this decay, and validate it; 0 for none. It is ramped "
        "up: (1 + t) / (10 + t) after t updates, if that is less.",
        minimum=0,
        maximum=0.999999,
    )
    gradient_noise_scale: bool = option(
        False, "Estimate how large a batch pays from the gradients of the ranks (McCandlish et al.), once per epoch."
    )


@dataclasses.dataclass(frozen=True)
class Schedules:
    """Schedules."""

    lr: float = option(0.1, "Learning rate before --lr_scaling.", minimum=0)
    lr_scaling: str = option(
        "workers", "Linear scaling: lr * N (H), lr * B / 256 (G), or none.", choices=("workers", "batch", "none")
    )
    lr_schedule: str = option(
        "exponential",
        "Learning rate after the warmup; sony_a and sony_b fix it throughout, mlperf is MLPerf's table by batch.",
        choices=("exponential", "step", "poly", "cosine", "constant", "sony_a", "sony_b", "mlperf"),
    )
    warmup_epochs: float = option(10.0, "T: epochs of the AdaBound or linear warmup.", unit="epochs", minimum=0)
    warmup_start_lr: float = option(0.1, "Where a linear warmup starts (not above its end).", minimum=0)
    lr_decay: float = option(0.9, "kappa: factor per epoch of the exponential schedule.", minimum=0, maximum=1)
    lr_decay_exponent: str = option(
        "epoch-T-1", "Exponent of kappa; H prints epoch.", choices=("epoch-T-1", "epoch-T", "epoch")
    )
    lr_steps: tuple[float, ...] = option((30.0, 60.0, 80.0), "Epochs at which the step schedule falls.", minimum=0)
    lr_step_factor: float = option(0.1, "By how much the step schedule falls.", minimum=0, maximum=1)
    lr_power: float = option(2.0, "Power of the polynomial schedule.", minimum=0)
    lr_final: float = option(0.0, "Where the polynomial and cosine schedules end.", minimum=0)
    momentum_rule: str = option(
        "constant",
        "Momentum when the batch changes: constant, 1 - .1 * 32768 / B (S), or 1 - .1 * B / 32768.",
        choices=("constant", "noise_scale", "noise_scale_inverse"),
    )


@dataclasses.dataclass(frozen=True)
class Optimization(Schedules, Optimizer, Batch):
    """Batch, optimizer and schedules."""
