"""Profiles some training steps (--profile_steps)."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import tensorflow as tf


class Profiler:
    """Writes a trace of some steps on rank 0, which TensorBoard shows; a run resumed after the
    first writes none.
    """

    def __init__(
        self,
        steps: Sequence[int],
        folder: pathlib.Path,
        wait: Callable[[], object],
        announce: Callable[[str], None],
    ):
        """Takes the first and the last of `steps`, from 1; `wait` returns when the device has
        finished its work.
        """
        self._first, self._last = steps
        self._folder = folder
        self._wait = wait
        self._announce = announce
        self._running = False

    def after(self, step: int) -> None:
        """Starts, or writes the trace, where that many steps are done."""
        if step == self._first - 1:
            self._wait()
            tf.profiler.experimental.start(str(self._folder))
            self._running = True
        elif step == self._last:
            self.finish()

    def finish(self) -> None:
        """Writes the trace, of a run that ends before the last step too."""
        if self._running:
            self._running = False
            self._wait()
            tf.profiler.experimental.stop()
            self._announce(
                f"profile of steps {self._first} to {self._last}: tensorboard"
                f" --logdir={self._folder}"
            )
