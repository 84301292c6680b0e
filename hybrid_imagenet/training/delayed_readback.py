"""Lets the host read small device variables without waiting for the steps under way."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import tensorflow as tf


class DelayedReadback:
    """Reads small device variables from a copy that is some steps old.

    Reading a variable blocks until the GPU has drained its queue, which leaves it idle. A copy that
    was made `delay_steps` ago is on the host already, while the steps since then are still running.
    A thread fetches each copy as soon as it is made, because a transfer that is issued later waits
    for all work that the device has received before it.

    If values are read more often than every `delay_steps` + 1 steps, no copy is old enough. Then
    the copy is made in the step itself, and the host waits for that step.

    Attributes:
      age_steps: Age of the copy that `read` uses, in steps; 0 while it reads the variables.
    """

    def __init__(self, variables: Mapping[str, tf.Variable], delay_steps: int) -> None:
        """Starts without a copy.

        Args:
          variables: Scalars or vectors of numbers that float64 represents exactly, by name.
          delay_steps: Steps between making a copy and reading it; 0 reads the present values.
        """
        self._variables = dict(variables)
        self._delay_steps = delay_steps
        self.age_steps = 0
        self._copied_values: dict[str, npt.NDArray[np.float64]] = {}
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "delayed readback")
        self.discard_copy()

    def copy_if_due(self, step: int, every_steps: int) -> None:
        """Makes a copy if it will be read, at a multiple of `every_steps`.

        Args:
          step: Number of the step that has just been issued, from 1.
          every_steps: Steps between two reads.
        """
        if (step + self._delay_steps) % every_steps == 0:
            self._start_copy(step)

    @contextlib.contextmanager
    def reading_copy(self, step: int) -> Iterator[None]:
        """Makes `read` return values of the copy inside this context.

        It waits for the step at which the copy was made. Without a copy it makes one now.

        Args:
          step: Number of the step that has just been issued, from 1.
        """
        copy = self._copy or self._start_copy(step)
        sizes = [variable.shape.num_elements() for variable in self._variables.values()]
        vectors = np.split(copy.result(), np.cumsum(sizes)[:-1])
        self.age_steps = step - self._copy_step
        self._copied_values = dict(zip(self._variables, vectors, strict=True))
        try:
            yield
        finally:
            self.age_steps = 0
            self._copied_values = {}

    def discard_copy(self) -> None:
        """Discards the copy, because the variables have been reset since."""
        self._copy_step = 0
        self._copy: concurrent.futures.Future[npt.NDArray[np.float64]] | None = None

    def read(self, name: str) -> npt.NDArray[np.float64]:
        """Returns the values of a variable, float64 [n].

        Inside `reading_copy` it returns the values of the copy. At other times it waits for the
        device.
        """
        copied = self._copied_values.get(name)
        if copied is not None:
            return copied
        return np.atleast_1d(self._variables[name].numpy()).astype(np.float64)

    def _start_copy(self, step: int) -> concurrent.futures.Future[npt.NDArray[np.float64]]:
        self._copy_step = step
        self._copy = self._executor.submit(self._concatenate().numpy)
        return self._copy

    @tf.function(autograph=False)
    def _concatenate(self) -> tf.Tensor:
        vectors = [tf.reshape(variable, [-1]) for variable in self._variables.values()]
        return tf.concat([tf.cast(vector, tf.float64) for vector in vectors], 0)
