"""Creates schedules from the few numbers that `model.fit` needs, without TensorFlow.

All schedules begin with a linear warmup of `warmup_epochs` from `warmup_start_lr` to `peak` (Goyal
et al. 2.2); by default there is none. Lengths are in epochs. `peak` is the learning rate for the
global batch of all ranks, and `epochs` the length of the run. Invalid numbers raise ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.schedules import training_schedule
from hybrid_imagenet.schedules.training_schedule import Schedule


def constant(peak: float, epochs: float, **warmup: float) -> Schedule:
    """Keeps `peak` after the warmup."""
    return _create("constant", peak, epochs, **warmup)


def cosine(peak: float, epochs: float, *, final: float = 0.0, **warmup: float) -> Schedule:
    """Decays from `peak` to `final` along half a cosine.

    Reference:
      Loshchilov, Hutter, arXiv 1608.03983.
    """
    return _create("cosine", peak, epochs, lr_final=final, **warmup)


def polynomial(
    peak: float, epochs: float, *, power: float = 2.0, final: float = 0.0, **warmup: float
) -> Schedule:
    """Decays from `peak` to `final` by a power of the remaining epochs.

    MLPerf's LARS uses a power of 2.
    """
    return _create("poly", peak, epochs, lr_power=power, lr_final=final, **warmup)


def step(
    peak: float,
    epochs: float,
    *,
    at: Sequence[float] = (30.0, 60.0, 80.0),
    factor: float = 0.1,
    **warmup: float,
) -> Schedule:
    """Multiplies the learning rate by `factor` at each epoch of `at` (Goyal et al. 5.1)."""
    return _create(
        "step", peak, epochs, lr_steps=tuple(map(float, at)), lr_step_factor=factor, **warmup
    )


def exponential(peak: float, epochs: float, *, decay: float = 0.9, **warmup: float) -> Schedule:
    """Multiplies the learning rate by `decay` after each epoch.

    Epochs are counted from the end of the warmup.

    Reference:
      Lu et al. 2.2.1, where the factor is kappa.
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
    """Creates the two phases of `optimizers.Hybrid` (Lu et al. 2.2.1).

    In the first phase the bounds of AdaBound close at `peak`; the second is SGD.

    Args:
      peak: learning rate lr * N at the end of the warmup.
      epochs: length of the run.
      warmup_epochs: T.
      momentum: momentum of SGD.
      decay: decay of SGD's learning rate, a name in `schedules.training_schedule.SCHEDULES`.
      options: options of the decay and of the bounds (`adabound_beta2`, `adabound_bound_time`).
    """
    warmup = {"warmup_epochs": warmup_epochs, "bounded_warmup": True}
    return _create(decay, peak, epochs, momentum=momentum, **warmup, **options)


def _create(
    decay: str, peak: float, epochs: float, *, warmup_start_lr: float = 0.0, **options: Any
) -> Schedule:
    # `peak` is already the learning rate for all ranks, so nothing is scaled by workers or batch.
    unscaled: dict[str, Any] = {
        "lr": float(peak),
        "warmup_start_lr": float(warmup_start_lr),
        "lr_scaling": "none",
    }
    return training_schedule.create(
        lr_schedule=decay, epochs=epochs, workers=1, base_batch=1, **unscaled, **options
    )
