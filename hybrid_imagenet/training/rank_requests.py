"""Makes all ranks follow a request to stop or to save at the same step."""

from __future__ import annotations

import itertools
import time

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.resilience.stop_signals import REQUESTS


class RankRequests:
    """Carries this rank's requests in a small vector that each step sums over ranks.

    Attributes:
      stop: whether a rank had asked to stop before the last step.
      save: whether a rank had asked to save before the last step.
    """

    def __init__(self, save_every_seconds: float | None = None):
        """Starts without requests.

        Args:
          save_every_seconds: asks for checkpoints by time; on one rank only.
        """
        self.stop = False
        self.save = False
        self._save_every_seconds = save_every_seconds
        self._last_save = time.monotonic()
        # Constants are copied to the device once, so that no step has to copy a vector.
        self._vectors = {
            bits: tf.constant(bits, tf.int32) for bits in itertools.product((0, 1), repeat=2)
        }

    def vector(self) -> tf.Tensor:
        """Returns this rank's requests, int32 [2]: stop, save."""
        save = self._save_every_seconds is not None and (
            time.monotonic() - self._last_save >= self._save_every_seconds
        )
        if save:
            self._last_save = time.monotonic()
        return self._vectors[int(REQUESTS.stop), int(save)]

    def update(self, summed: npt.NDArray[np.int32]) -> None:
        """Updates `stop` and `save` from the sum of the vectors of all ranks, int32 [2]."""
        stop, save = summed > 0
        self.stop = bool(stop)
        self.save = bool(save)
