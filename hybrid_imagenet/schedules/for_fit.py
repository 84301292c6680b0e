"""Makes schedules from the few numbers that `model.fit` needs; nothing here needs TensorFlow.

All begin with a linear warmup of `warmup_epochs` from `warmup_start_lr` to `peak` (Goyal et al.
2.2). Lengths are in epochs; `peak` is the learning rate for the global batch of all ranks; `epochs`
is the length of the run. They raise ValueError for numbers that cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.schedules import training_schedule
from hybrid_imagenet.schedules.training_schedule import Schedule


def constant(peak: float, epochs: float, **warmup: float) -> Schedule:
    """`peak` throughout after the warmup."""
    return _create("constant", peak, epochs, **warmup)


def cosine(peak: float, epochs: float, *, final: float = 0.0, **warmup: float) -> Schedule:
    """Half a cosine from `peak` to `final` (Loshchilov, Hutter, arXiv 1608.03983)."""
    return _create("cosine", peak, epochs, lr_final=final, **warmup)


def polynomial(
    peak: float, epochs: float, *, power: float = 2.0, final: float = 0.0, **warmup: float
) -> Schedule:
    """From `peak` to `final` by a power of the epochs left; 2 is that of MLPerf's LARS."""
    return _create("poly", peak, epochs, lr_power=power, lr_final=final, **warmup)


def step(
    peak: float,
    epochs: float,
    *,
    at: Sequence[float] = (30.0, 60.0, 80.0),
    factor: float = 0.1,
    **warmup: float,
) -> Schedule:
    """`peak` times `factor` for each epoch of `at` that has been reached (Goyal et al. 5.1)."""
    return _create(
        "step", peak, epochs, lr_steps=tuple(map(float, at)), lr_step_factor=factor, **warmup
    )


def exponential(peak: float, epochs: float, *, decay: float = 0.9, **warmup: float) -> Schedule:
    """`peak` times `decay` to the power of the epochs since the warmup (Lu et al. 2.2.1, where it
    is kappa).
    """
    return _create("exponential", peak, epochs, lr_decay=decay, **warmup)


def hybrid(
    peak: float,
    epochs: float,
    *,
    warmup_epochs: float = 10.0,
    momentum: float = 0.9,
    decay: str = "exponential",
    **options: Any,
) -> Schedule:
    """The two phases of `optimizers.Hybrid`: AdaBound with bounds that close at `peak`, then SGD
    (Lu et al. 2.2.1).

    Args:
      peak: learning rate lr * N at the end of the warmup.
      epochs: length of the run.
      warmup_epochs: T.
      momentum: of SGD.
      decay: of SGD's learning rate: a name in `schedules.training_schedule.SCHEDULES`.
      options: of the decay and the bounds (`adabound_beta2`, `adabound_bound_time`).
    """
    warmup = {"warmup_epochs": warmup_epochs, "bounded_warmup": True}
    return _create(decay, peak, epochs, momentum=momentum, **warmup, **options)


def _create(
    decay: str, peak: float, epochs: float, *, warmup_start_lr: float = 0.0, **options: Any
) -> Schedule:
    rates: dict[str, Any] = {
        "lr": float(peak),
        "warmup_start_lr": float(warmup_start_lr),
        "lr_scaling": "none",
    }
    return training_schedule.create(
        lr_schedule=decay, epochs=epochs, workers=1, base_batch=1, **rates, **options
    )
