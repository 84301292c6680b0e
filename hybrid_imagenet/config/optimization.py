"""Flags for the batch, the optimizer and its schedules."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.config.options import option


@dataclasses.dataclass(frozen=True)
class Optimization:
    """Batch, optimizer and schedules."""

    per_gpu_batch: int = option(256, "Images per GPU and micro-batch.", unit="images", minimum=1)
    optimizer: str = option(
        "hybrid", "Update rule.", choices=("hybrid", "adabound", "sgd", "lars"),
    )
    lr: float = option(0.1, "Learning rate of one GPU, before scaling by N.", minimum=0)
    momentum: float = option(0.9, "Momentum of the SGD phase (METHODS 1.7).", minimum=0, maximum=1)
    weight_decay: float = option(1e-4, "Coupled L2 decay.", minimum=0)
    warmup_epochs: float = option(10.0, "T: epochs of the AdaBound or gradual warmup.", unit="epochs", minimum=0)
    lr_decay: float = option(0.9, "kappa: factor per epoch of the exponential schedule.", minimum=0, maximum=1)
