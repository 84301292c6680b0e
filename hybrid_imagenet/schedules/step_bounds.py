"""Computes the bounds on Adam's step that turn it into SGD.

`hybrid_bounds` is from Lu et al., `adabound_bounds` from AdaBound's authors. Both use arithmetic
only, so that they accept floats, NumPy arrays and TensorFlow tensors.
"""

from __future__ import annotations

import math
from typing import Any


def hybrid_bounds(
    t: float, warmup: float, peak: float, beta2: float = 0.999
) -> tuple[float, float]:
    """Returns lower and upper bound of the warmup's step at epoch `t` (Lu et al. §2.2.1).

    lower = (t / T) peak,  upper = peak + 1 / ((1 - beta2) t) - 1 / ((1 - beta2) T).

    For t -> 0 the bounds are (0, inf), which is plain Adam. At t = T both are `peak`, which is
    plain SGD on the averaged gradient. The upper bound is never below the lower one, although
    rounding could cause that near T.

    Args:
      t: Epochs done, fractional; values outside [0, T] count as the nearest end.
      warmup: T, in epochs; 0 means that there is no warmup.
      peak: Learning rate at which SGD continues at T, lr * N.
      beta2: Decay of the second moment.
    """
    if warmup <= 0 or t >= warmup:
        return peak, peak
    if t <= 0:
        return 0.0, math.inf
    lower = t / warmup * peak
    upper = peak + (1.0 / t - 1.0 / warmup) / (1.0 - beta2)
    return lower, max(upper, lower)


def adabound_bounds(step: Any, final_lr: Any, gamma: float = 1e-3) -> tuple[Any, Any]:
    """Returns lower and upper bound at an update (Luo et al., ICLR 2019).

    lower = F (1 - 1 / (gamma t + 1)),  upper = F (1 + 1 / (gamma t)).

    Args:
      step: Number t of the update, from 1.
      final_lr: F, the learning rate at which the bounds close.
      gamma: How fast they close.
    """
    progress = gamma * step
    return final_lr * (1.0 - 1.0 / (progress + 1.0)), final_lr * (1.0 + 1.0 / progress)
