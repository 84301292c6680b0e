"""Divides the images of a class into those to train on and those to validate: always the same ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.numerics.sampling import SampleOrder

_SEED = 0xF01D  # of the choice; never a run's seed, so that all runs and commands agree on the images


def held_out(count: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Returns which of the `count` images of a class are validated: bool [count].

    Their number is the nearest to `fraction * count`, but at least one is validated and at least one trained on. The
    only image of a class is trained on.
    """
    chosen = np.zeros(count, bool)
    if count > 1:
        number = min(max(round(fraction * count), 1), count - 1)
        chosen[SampleOrder(count, seed=_SEED).at(0, np.arange(number, dtype=np.int64))] = True
    return chosen
