"""Oracle for the average of weights in float64, written as a weighted sum.

It is s_t = d_t s_{t-1} + (1 - d_t) w_t.
"""

import numpy as np


def averaged(first, weights, decay, every=1):
    """Returns the average after updates from `first` to each of `weights` in turn.

    Only every k-th weights are averaged.
    """
    factors = [
        min(decay, (1 + t) / (10 + t)) ** every if t % every == 0 else 1.0
        for t in range(1, len(weights) + 1)
    ]
    total = np.prod(factors) * np.asarray(first, np.float64)
    for t, w in enumerate(weights):
        total = total + (1 - factors[t]) * np.prod(factors[t + 1 :]) * np.asarray(w, np.float64)
    return total
