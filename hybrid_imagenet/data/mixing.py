"""Warns if consecutive training images hold few classes."""

from __future__ import annotations

import logging
import threading

import numpy as np
import numpy.typing as npt

IMAGES_PER_GROUP = 256
"""Number of consecutive images among which classes are counted."""
_NUM_GROUPS = 8
MONITORED_IMAGES = _NUM_GROUPS * IMAGES_PER_GROUP
"""Number of images from the start of training whose classes are counted."""
# Batches with fewer than this are clearly not mixed.
_MIN_FRACTION_OF_EXPECTED = 0.5
_log = logging.getLogger(__name__)


def expected_classes(num_classes: int, num_images: int = IMAGES_PER_GROUP) -> float:
    """Returns the expected number of distinct classes among randomly drawn images.

    Images are drawn with replacement from classes of equal size.
    """
    return num_classes * (1 - (1 - 1 / num_classes) ** num_images)


def mixing_warning(labels: npt.NDArray[np.int64], num_classes: int, window: int) -> str | None:
    """Returns a warning with its remedy if consecutive images hold too few classes.

    Too few are less than half of the expected number.

    Args:
      labels: Labels of the first images in the order of training, int64 [n].
      num_classes: Number of classes, which are assumed to have equal sizes.
      window: Number of shards that are mixed at a time.

    Returns:
      The warning, or None if the classes are mixed.
    """
    group_size = min(IMAGES_PER_GROUP, len(labels))
    groups = labels[: len(labels) // group_size * group_size].reshape(-1, group_size)
    mean_classes = float(np.mean([len(np.unique(group)) for group in groups]))
    expected = expected_classes(num_classes, group_size)
    if mean_classes >= _MIN_FRACTION_OF_EXPECTED * expected:
        return None
    return (
        f"{group_size} consecutive training images hold {mean_classes:.0f} classes on average;"
        f" {expected:.0f} are expected if all images are mixed. The files seem to be sorted by"
        f" class. Set --shuffle_window to more than {window} (0 mixes all images), or mix the"
        " images before you write them."
    )


class ClassMixingMonitor:
    """Warns once if the first training images that a rank reads hold few classes."""

    def __init__(self, num_classes: int, window: int) -> None:
        """Starts without labels.

        Args:
          num_classes: Number of classes.
          window: Number of shards that are mixed at a time.
        """
        self._num_classes = num_classes
        self._window = window
        self._lock = threading.Lock()
        self._labels: list[npt.NDArray[np.int64]] = []
        self._num_missing = MONITORED_IMAGES

    def add(self, labels: npt.NDArray[np.int64]) -> None:
        """Adds the labels of a micro-batch, int64 [b]; safe to call from several threads."""
        with self._lock:
            if self._num_missing <= 0:
                return
            self._labels.append(labels)
            self._num_missing -= len(labels)
            if self._num_missing > 0:
                return
        monitored = np.concatenate(self._labels)[:MONITORED_IMAGES]
        warning = mixing_warning(monitored, self._num_classes, self._window)
        if warning is not None:
            _log.warning(warning)
