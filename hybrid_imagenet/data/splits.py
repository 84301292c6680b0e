"""Chooses the images that are not trained on: of each class, for validation, or of the whole set,
for tuning.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.order.sampling import Indices, SampleOrder

_CLASS_SEED = (
    0xF01D  # of a class's images; never a run's seed, so that all runs and commands agree on them
)
# of tuning under seed 0: the choice has a stream of its own beside the order of the images
_FIRST_SEED = 0x7E57


def of_class(count: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Returns which of the `count` images of a class are validated: bool [count].

    Their number is the nearest to `fraction * count`, but at least one is validated and at least
    one trained on. The only image of a class is trained on.
    """
    chosen = np.zeros(count, bool)
    if count > 1:
        number = min(max(round(fraction * count), 1), count - 1)
        chosen[SampleOrder(count, seed=_CLASS_SEED).at(0, np.arange(number, dtype=np.int64))] = True
    return chosen


def held_out(amount: float, num_examples: int) -> int:
    """Returns the number of images held out of `num_examples`.

    Args:
      amount: below 1 a fraction of the images, else their number; 0 holds out none.
      num_examples: training images.

    Raises:
      ValueError: if no image is left for training or for tuning.
    """
    count = int(amount) if amount >= 1 else round(amount * num_examples)
    if amount and not 0 < count < num_examples:
        raise ValueError(
            f"{count} of {num_examples} training images would be held out: hold out one, but"
            " not all"
        )
    return count


def split(amount: float, num_examples: int, seed: int = 0) -> tuple[Indices, Indices]:
    """The numbers of the images that stay and of those held out for tuning, int64, ascending; see
    `held_out`.

    Every seed has images of its own, so that an interval over seeds holds the variance of the
    training images too.
    """
    count = held_out(amount, num_examples)
    chosen = SampleOrder(num_examples, seed=_FIRST_SEED + seed).at(
        0, np.arange(count, dtype=np.int64)
    )
    stays = np.ones(num_examples, bool)
    stays[chosen] = False
    return np.flatnonzero(stays), np.flatnonzero(~stays)
