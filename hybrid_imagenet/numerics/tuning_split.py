"""Chooses the training images held out for tuning, by the seed of a run.

Every seed has images of its own, so that an interval over seeds holds the variance of the training images too.
"""

from __future__ import annotations

import numpy as np

from hybrid_imagenet.numerics.sampling import Indices, SampleOrder

_FIRST_SEED = 0x7E57  # of seed 0: the choice has a stream of its own beside the order of the images


def held_out(amount: float, num_examples: int) -> int:
    """Returns the number of images held out of `num_examples`.

    Args:
      amount: below 1 a fraction of the images, else their number; 0 holds out none.
      num_examples: training images.

    Raises:
      ValueError: if no image is left for training or for tuning, or the number is not whole.
    """
    if amount >= 1 and amount != int(amount):
        raise ValueError(f"{amount:g} is neither a fraction below 1 nor a whole number of images")
    count = int(amount) if amount >= 1 else round(amount * num_examples)
    if amount and not 0 < count < num_examples:
        raise ValueError(f"{count} of {num_examples} training images would be held out: hold out one, but not all")
    return count


def split(amount: float, num_examples: int, seed: int = 0) -> tuple[Indices, Indices]:
    """The numbers of the images that stay and of those held out under a seed, int64, ascending; see `held_out`."""
    count = held_out(amount, num_examples)
    chosen = SampleOrder(num_examples, seed=_FIRST_SEED + seed).at(0, np.arange(count, dtype=np.int64))
    stays = np.ones(num_examples, bool)
    stays[chosen] = False
    return np.flatnonzero(stays), np.flatnonzero(~stays)
