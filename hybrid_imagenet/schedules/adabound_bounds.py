"""Computes bounds on the step of Adam that turn it into SGD, after Lu et al. and after AdaBound's
authors.

The functions use arithmetic only, so that they take floats, NumPy arrays and TensorFlow tensors
alike.
"""

from __future__ import annotations

import math
from typing import Any


def hybrid_bounds(
    t: float, warmup: float, peak: float, beta2: float = 0.999
) -> tuple[float, float]:
    """Lower and upper bound of the warmup's step at epoch `t` (Lu et al. §2.2.1).

    lower = (t / T) peak,  upper = peak + 1 / ((1 - beta2) t) - 1 / ((1 - beta2) T).

    At t -> 0 the bounds are (0, inf), plain Adam; at t = T both are `peak`, plain SGD on the
    averaged gradient. The upper bound never falls under the lower one, which rounding could cause
    near T.

    Args:
      t: epochs done, fractional; values outside [0, T] are taken as the nearest end.
      warmup: T, in epochs; 0 means that there is no warmup.
      peak: the learning rate that SGD takes over at T, lr * N.
      beta2: decay of the second moment.
    """
    if warmup <= 0 or t >= warmup:
        return peak, peak
    if t <= 0:
        return 0.0, math.inf
    lower = t / warmup * peak
    upper = peak + (1.0 / t - 1.0 / warmup) / (1.0 - beta2)
    return lower, max(upper, lower)


def adabound_bounds(step: Any, final_lr: Any, gamma: float = 1e-3) -> tuple[Any, Any]:
    """Lower and upper bound at update `step`, counted from 1 (Luo et al., ICLR 2019).

    lower = F (1 - 1 / (gamma t + 1)),  upper = F (1 + 1 / (gamma t)).
    """
    progress = gamma * step
    return final_lr * (1.0 - 1.0 / (progress + 1.0)), final_lr * (1.0 + 1.0 / progress)
