"""Computes the schedules of the learning rate by name, and the linear warmup.

A schedule is a function of the epoch, the peak of the learning rate, the epoch T at which the warmup ends, and the
epoch at which the run ends; its other arguments are flags of the same name. A new one needs a line in `SCHEDULES`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, get_args

Exponent = Literal["epoch-T-1", "epoch-T", "epoch"]
EXPONENTS = get_args(Exponent)


def require(value: str, allowed: Iterable[str]) -> None:
    """Raises ValueError for a value that is not among those allowed."""
    if value not in allowed:
        raise ValueError(f"{value!r}: choose one of {', '.join(allowed)}")


def linear(epoch: float, start: float, peak: float, epochs: float) -> float:
    """From `start` at epoch 0 to `peak` at `epochs`."""
    return start + (peak - start) * epoch / epochs


def gradual_warmup(
    epoch: float, peak: float, epochs: float, *, warmup_start_lr: Annotated[float, ">= 0"] = 0.1
) -> float:
    """Linear to `peak` at `epochs` (Goyal et al. §2.2).

    Args:
      epoch: fractional epoch at the start of the step, below `epochs`.
      peak: learning rate at its end.
      epochs: its length.
      warmup_start_lr: where a linear warmup starts (not above its end).
    """
    return linear(epoch, min(warmup_start_lr, peak), peak, epochs)


def warmup_from_zero(
    epoch: float, peak: float, epochs: float, *, warmup_start_lr: Annotated[float, ">= 0"] = 0.0
) -> float:
    """The same from 0, for optimizers whose peak may lie below the 0.1 of Goyal et al., where nothing would rise.

    Args:
      epoch: fractional epoch at the start of the step, below `epochs`.
      peak: learning rate at its end.
      epochs: its length.
      warmup_start_lr: where a linear warmup starts (not above its end).
    """
    return gradual_warmup(epoch, peak, epochs, warmup_start_lr=warmup_start_lr)


def exponential(
    epoch: float,
    peak: float,
    start: float,
    end: float,
    *,
    lr_decay: Annotated[float, "0 to 1"] = 0.9,
    lr_decay_exponent: Exponent = "epoch-T-1",
) -> float:
    """peak lr_decay^k in the steps of epoch number e = floor(epoch) + 1 (Lu et al. §2.2.1).

    They print k = e and say that the decay starts from the peak; k = e - T - 1 does so. For a T that is not whole,
    epochs are counted from T.

    Args:
      epoch: fractional epoch at the start of the step, T or more.
      peak: lr * N.
      start: T.
      end: of the run.
      lr_decay: factor kappa per epoch of the exponential schedule.
      lr_decay_exponent: exponent of kappa; Lu et al. print epoch.

    Raises:
      ValueError: for an exponent that does not exist.
    """
    del end
    require(lr_decay_exponent, EXPONENTS)
    k = math.floor(epoch - start) + {"epoch-T-1": 0.0, "epoch-T": 1.0, "epoch": 1.0 + start}[lr_decay_exponent]
    return float(peak * lr_decay**k)


def step(
    epoch: float,
    peak: float,
    start: float,
    end: float,
    *,
    lr_steps: Annotated[tuple[float, ...], ">= 0"] = (30.0, 60.0, 80.0),
    lr_step_factor: Annotated[float, "0 to 1"] = 0.1,
) -> float:
    """peak times a factor for each epoch of a list that has been reached (Goyal et al. §5.1).

    Args:
      epoch: fractional epoch.
      peak: learning rate before the first of them.
      start: T.
      end: of the run.
      lr_steps: epochs at which the step schedule falls.
      lr_step_factor: by how much the step schedule falls.
    """
    del start, end
    return float(peak * lr_step_factor ** sum(epoch >= m for m in lr_steps))


def poly(
    epoch: float,
    peak: float,
    start: float,
    end: float,
    *,
    lr_power: Annotated[float, ">= 0"] = 2.0,
    lr_final: Annotated[float, ">= 0"] = 0.0,
) -> float:
    """lr_final + (peak - lr_final) (1 - (epoch - start) / (end - start))^lr_power between epochs `start` and `end`.

    Args:
      epoch: fractional epoch.
      peak: at `start`.
      start: T.
      end: of the run.
      lr_power: power of the polynomial schedule.
      lr_final: where the schedule ends.
    """
    left = 1.0 - (min(epoch, end) - start) / (end - start)
    return float(lr_final + (peak - lr_final) * left**lr_power)


def cosine(epoch: float, peak: float, start: float, end: float, *, lr_final: Annotated[float, ">= 0"] = 0.0) -> float:
    """Half a cosine from `peak` at epoch `start` to `lr_final` at `end` (Loshchilov, Hutter, arXiv 1608.03983).

    Args:
      epoch: fractional epoch.
      peak: at `start`.
      start: T.
      end: of the run.
      lr_final: where the schedule ends.
    """
    progress = (min(epoch, end) - start) / (end - start)
    return lr_final + (peak - lr_final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def constant(epoch: float, peak: float, start: float, end: float) -> float:
    """The peak throughout."""
    del epoch, start, end
    return peak


def sony_a(epoch: float, peak: float, start: float, end: float) -> float:
    """Configuration A of Mikami et al.: linear from 1e-5 to 34, then polynomial of power 2 to 0; `peak` plays no part.

    They have 34 epochs of warmup; the code that they cite has 12 for a batch of 32K.
    """
    del peak
    return linear(epoch, 1e-5, 34.0, start) if epoch < start else poly(epoch, 34.0, start, end)


def sony_b(epoch: float, peak: float, start: float, end: float) -> float:
    """Configuration B of Mikami et al., as printed; it jumps at epochs 5 and 30. `peak` and `start` play no part."""
    del peak, start
    if epoch < 5:
        return linear(epoch, 0.2, 29.0, 5.0)
    return poly(epoch, 29.0 if epoch < 30 else 50.0, 0.0, end)


def mlperf(epoch: float, peak: float, start: float, end: float) -> float:
    """Polynomial of power 2 to 0; peak, warmup and end are in `numerics.mlperf`."""
    return poly(epoch, peak, start, end)


@dataclasses.dataclass(frozen=True)
class Decay:
    """A schedule by name.

    Attributes:
      rate: rate(epoch, peak, T, end of the run, **options).
      fixed: peak and warmup are part of it.
    """

    rate: Callable[..., float]
    fixed: bool = False


SCHEDULES = {
    "exponential": Decay(exponential),
    "step": Decay(step),
    "poly": Decay(poly),
    "cosine": Decay(cosine),
    "constant": Decay(constant),
    "sony_a": Decay(sony_a, fixed=True),
    "sony_b": Decay(sony_b, fixed=True),
    "mlperf": Decay(mlperf),
}
FIXED = tuple(name for name, decay in SCHEDULES.items() if decay.fixed)
