"""Creates schedules from the few numbers that `model.fit` needs, without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.schedules import training_schedule
from hybrid_imagenet.schedules.training_schedule import Schedule


def constant(
    peak: float,
    epochs: float,
    *,
    warmup_epochs: float = 0.0,
    warmup_start_lr: float = 0.0,
    momentum: float | None = None,
) -> Schedule:
    """Keeps the learning rate at its peak after the warmup.

    At epoch e, fractional, after a warmup of T epochs:

        lr(e) = warmup_start_lr + (peak - warmup_start_lr) e / T    for e < T
        lr(e) = peak                                                otherwise

    Example:
      schedule = hi.schedules.constant(0.1 * hi.size(), epochs=8, warmup_epochs=1)

    Args:
      peak: Learning rate after the warmup, for the global batch of all ranks.
      epochs: Length of the run.
      warmup_epochs: T, length of the linear warmup in epochs (default: 0.0, no warmup).
      warmup_start_lr: Learning rate at epoch 0; `peak`, if that is less (default: 0.0).
      momentum: Momentum in every step, for optimizers of this package (default: None, that of the
        optimizer).

    Returns:
      The schedule, for `hi.DistributedOptimizer(schedule=...)`.

    Raises:
      ValueError: If `peak` is negative.

    Reference:
      Goyal et al. §2.2, for the warmup.
    """
    return _create("constant", peak, epochs, warmup_epochs, warmup_start_lr, momentum=momentum)


def cosine(
    peak: float,
    epochs: float,
    *,
    final: float = 0.0,
    warmup_epochs: float = 0.0,
    warmup_start_lr: float = 0.0,
    momentum: float | None = None,
) -> Schedule:
    """Decays the learning rate from its peak along half a cosine.

    At epoch e, fractional, of E, after a warmup of T epochs:

        lr(e) = final + (peak - final) (1 + cos(pi (e - T) / (E - T))) / 2

    Example:
      schedule = hi.schedules.cosine(0.1 * hi.size(), epochs=90, warmup_epochs=5)
      optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(), schedule=schedule)

    Args:
      peak: Learning rate after the warmup, for the global batch of all ranks.
      epochs: E, length of the run, at the end of which the learning rate is `final`.
      final: Learning rate at the end of the run (default: 0.0).
      warmup_epochs: T, length of the linear warmup in epochs (default: 0.0, no warmup).
      warmup_start_lr: Learning rate at epoch 0; `peak`, if that is less (default: 0.0).
      momentum: Momentum in every step, for optimizers of this package (default: None, that of the
        optimizer).

    Returns:
      The schedule, for `hi.DistributedOptimizer(schedule=...)`.

    Raises:
      ValueError: If `peak` is negative.

    Reference:
      Loshchilov, Hutter, arXiv 1608.03983.
    """
    return _create(
        "cosine", peak, epochs, warmup_epochs, warmup_start_lr, momentum=momentum, lr_final=final
    )


def polynomial(
    peak: float,
    epochs: float,
    *,
    power: float = 2.0,
    final: float = 0.0,
    warmup_epochs: float = 0.0,
    warmup_start_lr: float = 0.0,
    momentum: float | None = None,
) -> Schedule:
    """Decays the learning rate from its peak by a power of the remaining epochs.

    At epoch e, fractional, of E, after a warmup of T epochs:

        lr(e) = final + (peak - final) (1 - (e - T) / (E - T))^power

    MLPerf's runs with LARS use a power of 2.

    Example:
      schedule = hi.schedules.polynomial(10.0, epochs=40, warmup_epochs=5)
      optimizer = hi.DistributedOptimizer(hi.optimizers.LARS(), schedule=schedule)

    Args:
      peak: Learning rate after the warmup, for the global batch of all ranks.
      epochs: E, length of the run, at the end of which the learning rate is `final`.
      power: Exponent of the fraction of epochs that remains; 1 is a straight line (default: 2.0).
      final: Learning rate at the end of the run (default: 0.0).
      warmup_epochs: T, length of the linear warmup in epochs (default: 0.0, no warmup).
      warmup_start_lr: Learning rate at epoch 0; `peak`, if that is less (default: 0.0).
      momentum: Momentum in every step, for optimizers of this package (default: None, that of the
        optimizer).

    Returns:
      The schedule, for `hi.DistributedOptimizer(schedule=...)`.

    Raises:
      ValueError: If `peak` is negative.
    """
    return _create(
        "poly",
        peak,
        epochs,
        warmup_epochs,
        warmup_start_lr,
        momentum=momentum,
        lr_power=power,
        lr_final=final,
    )


def step(
    peak: float,
    epochs: float,
    *,
    at: Sequence[float] = (30.0, 60.0, 80.0),
    factor: float = 0.1,
    warmup_epochs: float = 0.0,
    warmup_start_lr: float = 0.0,
    momentum: float | None = None,
) -> Schedule:
    """Multiplies the learning rate by a factor at some epochs.

    At epoch e, fractional, after the warmup:

        lr(e) = peak factor^k,  where k is the number of epochs in `at` that are <= e

    Example:
      schedule = hi.schedules.step(0.1 * hi.size(), epochs=90, warmup_epochs=5)

    Args:
      peak: Learning rate after the warmup, for the global batch of all ranks.
      epochs: Length of the run.
      at: Epochs, counted from the start of the run, at which the learning rate changes
        (default: (30.0, 60.0, 80.0)).
      factor: Factor at each of these epochs (default: 0.1).
      warmup_epochs: Length of the linear warmup in epochs (default: 0.0, no warmup).
      warmup_start_lr: Learning rate at epoch 0; `peak`, if that is less (default: 0.0).
      momentum: Momentum in every step, for optimizers of this package (default: None, that of the
        optimizer).

    Returns:
      The schedule, for `hi.DistributedOptimizer(schedule=...)`.

    Raises:
      ValueError: If `peak` is negative.

    Reference:
      Goyal et al. §5.1.
    """
    return _create(
        "step",
        peak,
        epochs,
        warmup_epochs,
        warmup_start_lr,
        momentum=momentum,
        lr_steps=tuple(map(float, at)),
        lr_step_factor=factor,
    )


def exponential(
    peak: float,
    epochs: float,
    *,
    decay: float = 0.9,
    warmup_epochs: float = 0.0,
    warmup_start_lr: float = 0.0,
    momentum: float | None = None,
) -> Schedule:
    """Multiplies the learning rate by a factor after each epoch.

    At epoch e, fractional, after a warmup of T epochs:

        lr(e) = peak decay^floor(e - T)

    Example:
      schedule = hi.schedules.exponential(0.1 * hi.size(), epochs=30, warmup_epochs=5)

    Args:
      peak: Learning rate after the warmup, for the global batch of all ranks.
      epochs: Length of the run.
      decay: Factor after each epoch since the end of the warmup (default: 0.9).
      warmup_epochs: T, length of the linear warmup in epochs (default: 0.0, no warmup).
      warmup_start_lr: Learning rate at epoch 0; `peak`, if that is less (default: 0.0).
      momentum: Momentum in every step, for optimizers of this package (default: None, that of the
        optimizer).

    Returns:
      The schedule, for `hi.DistributedOptimizer(schedule=...)`.

    Raises:
      ValueError: If `peak` is negative.

    Reference:
      Lu et al. §2.2.1, where the factor is kappa.
    """
    return _create(
        "exponential",
        peak,
        epochs,
        warmup_epochs,
        warmup_start_lr,
        momentum=momentum,
        lr_decay=decay,
    )


def hybrid(
    peak: float,
    epochs: float,
    *,
    warmup_epochs: float = 10.0,
    momentum: float | None = None,
    decay: str = "exponential",
    **options: Any,
) -> Schedule:
    """Creates the two phases of `hi.optimizers.Hybrid`.

    In the first phase, AdaBound's step at epoch t, fractional, of a warmup of T epochs is clipped
    to bounds that close at the peak. In the second phase, SGD begins with the peak, and its
    learning rate decays:

        t / T peak  <=  step  <=  peak + (1 / t - 1 / T) / (1 - adabound_beta2)    for t < T
        lr(e) = peak 0.9^floor(e - T)                                              otherwise

    Example:
      schedule = hi.schedules.hybrid(0.1 * hi.size(), epochs=90)
      optimizer = hi.DistributedOptimizer(hi.optimizers.Hybrid(), schedule=schedule)

    Args:
      peak: Learning rate at the end of the warmup, for the global batch of all ranks; lr * N in
        the paper.
      epochs: Length of the run.
      warmup_epochs: T, length of the first phase in epochs (default: 10.0).
      momentum: Momentum of SGD in the second phase (default: None, that of the optimizer).
      decay: How SGD's learning rate decays: "exponential", "step", "poly", "cosine" or "constant"
        (default: "exponential").
      **options: Options of the decay (`lr_decay` and `lr_decay_exponent`, `lr_steps`, `lr_power`,
        `lr_final`); of the bounds (`adabound_beta2`, decay of the second moment, 0.999, and
        `adabound_bound_time`, "fractional" or "epoch"); and of the change to LARS
        (`hybrid_ramp_epochs`, epochs in which LARS is blended in, 0).

    Returns:
      The schedule, for `hi.DistributedOptimizer(schedule=...)`.

    Raises:
      ValueError: If `peak` is negative, or there is no such decay.
      TypeError: If there is no such option.

    Reference:
      Lu et al. §2.2.1.
    """
    return _create(
        decay, peak, epochs, warmup_epochs, momentum=momentum, bounded_warmup=True, **options
    )


def _create(
    decay: str,
    peak: float,
    epochs: float,
    warmup_epochs: float,
    warmup_start_lr: float = 0.0,
    **options: Any,
) -> Schedule:
    # `peak` is already the learning rate for all ranks, so nothing is scaled by workers or batch.
    return training_schedule.create(
        lr_schedule=decay,
        lr=float(peak),
        lr_scaling="none",
        epochs=epochs,
        workers=1,
        base_batch=1,
        warmup_epochs=warmup_epochs,
        warmup_start_lr=float(warmup_start_lr),
        **options,
    )
