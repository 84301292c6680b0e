"""Makes schedules from the few numbers that a model of one's own needs; nothing here needs TensorFlow."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.numerics import schedules
from hybrid_imagenet.numerics.schedules import Schedule


def after_warmup(
    decay: str,
    peak: float,
    epochs: float,
    *,
    warmup_epochs: float = 0.0,
    warmup_start_lr: float = 0.0,
    momentum: float = 0.9,
    **options: Any,
) -> Schedule:
    """A linear warmup to `peak`, then a decay (Goyal et al. 2.2).

    Args:
      decay: poly, cosine, step, exponential, constant, or another name in `numerics.decays.SCHEDULES`.
      peak: learning rate at the end of the warmup, for the whole batch of all ranks.
      epochs: length of the run.
      warmup_epochs: length of the warmup.
      warmup_start_lr: where it starts.
      momentum: of all steps.
      options: of the decay, as `lr_steps`.

    Raises:
      ValueError: for a decay that does not exist.
      TypeError: for an option that it does not have.
    """
    start = {"warmup_start_lr": float(warmup_start_lr)}
    return _create(decay, peak, epochs, warmup_epochs, momentum, bounded_warmup=False, **start, **options)


def hybrid(
    peak: float,
    epochs: float,
    *,
    warmup_epochs: float = 10.0,
    momentum: float = 0.9,
    decay: str = "exponential",
    **options: Any,
) -> Schedule:
    """The two phases of `optimizers.Hybrid`: AdaBound with bounds that close at `peak`, then SGD (Lu et al. 2.2.1).

    Args:
      peak: learning rate lr * N at the end of the warmup, for the whole batch of all ranks.
      epochs: length of the run.
      warmup_epochs: T.
      momentum: of SGD.
      decay: of SGD's rate, as in `after_warmup`.
      options: of the decay and the bounds (`adabound_beta2`, `bound_time`).
    """
    return _create(decay, peak, epochs, warmup_epochs, momentum, bounded_warmup=True, **options)


def _create(
    decay: str,
    peak: float,
    epochs: float,
    warmup_epochs: float,
    momentum: float,
    *,
    bounded_warmup: bool,
    **options: Any,
) -> Schedule:
    return schedules.create(
        lr_schedule=decay,
        lr=float(peak),
        epochs=epochs,
        workers=1,
        base_batch=1,
        lr_scaling="none",
        warmup_epochs=warmup_epochs,
        bounded_warmup=bounded_warmup,
        momentum=momentum,
        **options,
    )
