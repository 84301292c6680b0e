"""Chooses which training images to hold out for validation or for tuning."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.order.sampling import Indices, SampleOrder

# Independent of the run's seed, so that all runs and commands choose the same images of a class.
_VALIDATION_SEED = 0xF01D
# Added to the seed of a tuning split. It is not 0, so that the choice is independent of the order
# of the images, which has the same seed.
_TUNING_SEED_OFFSET = 0x7E57


def validation_mask(num_images: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Chooses the images of a class that are used for validation.

    Their number is `fraction * num_images`, rounded, but at least one image is for validation and
    at least one for training. If a class has a single image, it is for training.

    Args:
      num_images: Number of images of the class.
      fraction: Fraction for validation.

    Returns:
      Which images are for validation, bool [num_images].
    """
    is_validation = np.zeros(num_images, bool)
    if num_images > 1:
        num_chosen = min(max(round(fraction * num_images), 1), num_images - 1)
        order = SampleOrder(num_images, seed=_VALIDATION_SEED)
        is_validation[order.at(0, np.arange(num_chosen, dtype=np.int64))] = True
    return is_validation


def num_held_out(amount: float, num_examples: int) -> int:
    """Returns the number of images that are held out for tuning.

    Args:
      amount: Below 1, the fraction of the images; else their number. 0 holds out none.
      num_examples: Number of training images.

    Raises:
      ValueError: If no image would be left for training or for tuning.
    """
    count = int(amount) if amount >= 1 else round(amount * num_examples)
    if amount and not 0 < count < num_examples:
        raise ValueError(
            f"{count} of {num_examples} training images would be held out: hold out one, but"
            " not all"
        )
    return count


def split_for_tuning(amount: float, num_examples: int, seed: int = 0) -> tuple[Indices, Indices]:
    """Splits the training images into those for training and those for tuning.

    Every seed holds out different images, so that an interval over seeds includes the variance of
    the training images.

    Args:
      amount: See `num_held_out`.
      num_examples: Number of training images.
      seed: The run's seed.

    Returns:
      The indices for training and those for tuning, int64, ascending.
    """
    count = num_held_out(amount, num_examples)
    order = SampleOrder(num_examples, seed=_TUNING_SEED_OFFSET + seed)
    is_training = np.ones(num_examples, bool)
    is_training[order.at(0, np.arange(count, dtype=np.int64))] = False
    return np.flatnonzero(is_training), np.flatnonzero(~is_training)
