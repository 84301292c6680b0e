"""Measures how well an order mixes the classes: how many a batch of consecutive training images holds."""

from __future__ import annotations

import logging
import threading

import numpy as np
import numpy.typing as npt

IMAGES = 256  # that follow one another
_PIECES = 8  # of so many images, that are looked at
FIRST = _PIECES * IMAGES
"""The images of an epoch that show how it is mixed."""
_CLEARLY_BAD = 0.5  # of the expected number of classes
_log = logging.getLogger(__name__)


def expected(counts: npt.NDArray[np.int64], images: int = IMAGES) -> float:
    """Returns the mean number of classes among images that are drawn from all alike.

    Args:
      counts: images of each class, int64 [c].
      images: that are drawn, with replacement.
    """
    return float(np.sum(1 - (1 - counts / counts.sum()) ** images))


def complaint(labels: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], window: int) -> str | None:
    """Returns a line with the remedy if consecutive images hold less than half of the classes of a mixed order.

    Args:
      labels: of the first images in the order of training, int64 [n].
      counts: images of each class, int64 [c].
      window: shards whose images are mixed.
    """
    images = min(IMAGES, len(labels))
    pieces = labels[: len(labels) // images * images].reshape(-1, images)
    found = float(np.mean([len(np.unique(piece)) for piece in pieces]))
    wanted = expected(counts, images)
    if found >= _CLEARLY_BAD * wanted:
        return None
    return (
        f"{images} consecutive training images hold {found:.0f} classes on average, {wanted:.0f} if all were mixed: "
        f"the files seem to be sorted by class; give more than --shuffle_window={window} (0 mixes all), or mix the "
        "images before they are written"
    )


class Watch:
    """Warns once if the first training images that a rank reads hold few classes."""

    def __init__(self, num_classes: int, window: int) -> None:
        """Takes the number of classes, of which all are taken to have as many images, and the window of the order."""
        self._counts = np.ones(num_classes, np.int64)
        self._window = window
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
        if line := complaint(np.concatenate(self._labels)[:FIRST], self._counts, self._window):
            _log.warning(line)
