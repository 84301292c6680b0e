"""Measures how well an order mixes the classes: the number of classes in a batch of consecutive
training images.
"""

from __future__ import annotations

import logging
import threading

import numpy as np
import numpy.typing as npt

IMAGES = 256  # consecutive ones, in which classes are counted
_PIECES = 8  # times that many images are counted
FIRST = _PIECES * IMAGES  # from the start of an epoch
_CLEARLY_BAD = 0.5  # of the expected number of classes
_log = logging.getLogger(__name__)


def expected(classes: int, images: int = IMAGES) -> float:
    """Returns the expected number of classes among images drawn at random, with replacement, from
    equal classes.
    """
    return classes * (1 - (1 - 1 / classes) ** images)


def complaint(labels: npt.NDArray[np.int64], classes: int, window: int) -> str | None:
    """Returns a warning with its remedy if consecutive images hold less than half of the expected
    classes, else None.

    Args:
      labels: of the first images in the order of training, int64 [n].
      classes: their number; they are taken to be of equal size.
      window: number of shards mixed at a time.
    """
    images = min(IMAGES, len(labels))
    pieces = labels[: len(labels) // images * images].reshape(-1, images)
    found = float(np.mean([len(np.unique(piece)) for piece in pieces]))
    wanted = expected(classes, images)
    if found >= _CLEARLY_BAD * wanted:
        return None
    return (
        f"{images} consecutive training images hold {found:.0f} classes on average, {wanted:.0f} if"
        " all were mixed: the files seem to be sorted by class; give more than"
        f" --shuffle_window={window} (0 mixes all), or mix the images before they are written"
    )


class Watch:
    """Warns once if the first training images that a rank reads hold few classes."""

    def __init__(self, num_classes: int, window: int) -> None:
        """Takes the number of classes, and the window of shards."""
        self._num_classes, self._window = num_classes, window
        self._lock = threading.Lock()
        self._labels: list[npt.NDArray[np.int64]] = []
        self._missing = FIRST

    def add(self, labels: npt.NDArray[np.int64]) -> None:
        """Takes the labels of a micro-batch, int64 [b]; threads may call it at the same time."""
        with self._lock:
            if self._missing <= 0:
                return
            self._labels.append(labels)
            self._missing -= len(labels)
            if self._missing > 0:
                return
        if line := complaint(np.concatenate(self._labels)[:FIRST], self._num_classes, self._window):
            _log.warning(line)
