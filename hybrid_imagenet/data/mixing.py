"""Measures how well an order mixes the classes: how many a batch of consecutive training images holds."""

from __future__ import annotations

import logging
import threading

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.numerics.sampling import SampleOrder

IMAGES = 256  # that follow one another
_PIECES = 64  # of an epoch that are looked at in advance
_READ = 8  # that are looked at while they are read
_CLEARLY_BAD = 0.5  # of the expected number of classes
_log = logging.getLogger(__name__)


def expected(counts: npt.NDArray[np.int64], images: int = IMAGES) -> float:
    """Returns the mean number of classes among images that are drawn from all alike.

    Args:
      counts: images of each class, int64 [c].
      images: that are drawn, with replacement.
    """
    return float(np.sum(1 - (1 - counts / counts.sum()) ** images))


def measured(order: SampleOrder, labels: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Returns how many classes `IMAGES` consecutive images of an order's first epoch hold on average.

    Args:
      order: of all images.
      labels: int64 [n]; -1 for one that cannot be read.

    Returns:
      (measured, expected): the mean over pieces that lie evenly in the epoch; and that of a perfectly mixed order.
    """
    images = min(IMAGES, len(labels))
    starts = np.unique(np.linspace(0, len(labels) - images, _PIECES).astype(np.int64))
    found = [_distinct(labels[order.at(0, start + np.arange(images))]) for start in starts]
    return float(np.mean(found)), expected(np.bincount(labels[labels >= 0]), images)


def complaint(found: float, wanted: float, window: int) -> str:
    """Returns a line that says how well a window of shards mixes, with the remedy where it clearly does badly."""
    line = f"{IMAGES} consecutive training images hold {found:.0f} classes on average, {wanted:.0f} if all were mixed"
    if not is_bad(found, wanted):
        return line
    return (
        f"{line}: the files seem to be sorted by class; give more than --shuffle_window={window} (0 mixes all), or "
        "mix the images before they are written"
    )


def is_bad(found: float, wanted: float) -> bool:
    """Returns whether a measured number of classes is below half of the expected one."""
    return found < _CLEARLY_BAD * wanted


class Watch:
    """Warns once if the first training images that a rank reads hold few classes."""

    def __init__(self, num_classes: int, window: int) -> None:
        """Takes the number of classes, of which all are taken to have as many images, and the window of the order."""
        self._wanted = expected(np.ones(num_classes, np.int64))
        self._window = window
        self._lock = threading.Lock()
        self._labels: list[npt.NDArray[np.int64]] = []
        self._missing = _READ * IMAGES

    def add(self, labels: npt.NDArray[np.int64]) -> None:
        """Takes the labels of a micro-batch, int64 [b]; threads may call it at the same time."""
        with self._lock:
            if self._missing <= 0:
                return
            self._labels.append(labels)
            self._missing -= len(labels)
            if self._missing > 0:
                return
            pieces = np.concatenate(self._labels)[: _READ * IMAGES].reshape(_READ, IMAGES)
            self._labels.clear()
        found = float(np.mean([_distinct(piece) for piece in pieces]))
        if is_bad(found, self._wanted):
            _log.warning(complaint(found, self._wanted, self._window))


def _distinct(labels: npt.NDArray[np.integer]) -> int:
    return len(np.unique(labels[labels >= 0]))
