"""Profiles some training steps, on demand (--profile_steps)."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import tensorflow as tf


class Profiler:
    """Writes a trace of some steps on rank 0, which TensorBoard shows; a run resumed after the first writes none."""

    def __init__(
        self,
        steps: Sequence[int],
        folder: pathlib.Path,
        wait: Callable[[], object],
        announce: Callable[[str], None],
    ):
        """Takes the first and the last of `steps`, from 1; `wait` returns when the device has finished its work."""
        self._first, self._last = steps
        self._folder = folder
        self._wait = wait
        self._announce = announce
        self._running = False
        self._step: tf.profiler.experimental.Trace | None = None

    def step_begins(self, number: int) -> None:
        """Starts before the first step, from 1; marks the beginning of each."""
        if number == self._first:
            self._wait()
            self._running = self._attempt(lambda: tf.profiler.experimental.start(str(self._folder)))
        if self._running:
            self._step = tf.profiler.experimental.Trace("train", step_num=number, _r=1)
            self._step.__enter__()

    def step_ends(self, number: int) -> None:
        """Marks the end of a step; writes the profile after the last."""
        if not self._running or self._step is None:
            return
        if number == self._last:
            self._wait()
        self._step.__exit__(None, None, None)
        self._step = None
        if number == self._last:
            self.finish()

    def finish(self) -> None:
        """Writes the profile, of a run that ends before the last step too."""
        if not self._running:
            return
        self._running = False
        if self._attempt(tf.profiler.experimental.stop):
            self._announce(f"profile of steps {self._first} to {self._last}: tensorboard --logdir={self._folder}")

    def _attempt(self, call: Callable[[], object]) -> bool:
        """Makes a call; a profile that fails, as on a full disk, is reported and does not end training."""
        try:
            call()
        except Exception as error:  # TensorFlow's or the system's
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._announce(f"--profile_steps: no profile in {self._folder}, training continues: {reason}")
            return False
        return True
