"""Carries a request to stop or save from any rank to all ranks, which follow it at the same step."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.resilience.stop_signals import REQUESTS


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The action of all ranks after a step."""

    stop: bool
    save: bool


class Control:
    """Collects this rank's requests and carries them in a small vector that each step adds up over ranks.

    A signal asks for a stop after the current step (`stop_signals`).
    """

    def __init__(self, save_every_seconds: float | None = None):
        """Starts without requests; `save_every_seconds`, on one rank only, asks for checkpoints by time."""
        self._save_every_seconds = save_every_seconds
        self._last_save = time.monotonic()
        # One constant for each of the four words, so that a step issues no host-to-device copy of its own.
        self._words = {bits: tf.constant(bits, tf.int32) for bits in itertools.product((0, 1), repeat=2)}

    def word(self) -> tf.Tensor:
        """Returns this rank's requests, int32 [2]: stop, save."""
        save = self._save_every_seconds is not None and (time.monotonic() - self._last_save >= self._save_every_seconds)
        if save:
            self._last_save = time.monotonic()
        return self._words[int(REQUESTS.stop), int(save)]

    @staticmethod
    def read(total: npt.ArrayLike) -> Verdict:
        """Returns the verdict in the sum of all ranks' words."""
        return Verdict(*(np.asarray(total) > 0).tolist())
