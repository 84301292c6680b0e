"""Lets the host read small variables of a GPU without waiting for the steps under way."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import tensorflow as tf


class LateCopies:
    """Copies of small variables on the device.

    To read a variable is to wait until the device has done all that it was given, and then it has
    nothing to do. A copy that was made `lag` steps ago is there already, while the steps since then
    are under way. A thread fetches it as soon as it is made: a transfer waits for all that the
    device has been given before it.

    Attributes:
      behind: steps since the copy that `read` gives was made; 0 while it reads variables.
    """

    def __init__(self, variables: Mapping[str, tf.Variable], lag: int) -> None:
        """Takes vectors or scalars, by name, of numbers that float64 holds, and the lag in
        steps.
        """
        self._variables = dict(variables)
        self._lag = lag
        self._found: dict[str, npt.NDArray[np.float64]] = {}
        self._fetching = concurrent.futures.ThreadPoolExecutor(1, "late copies")
        self.forget()

    def make(self, step: int, every: int) -> None:
        """Makes a copy after the step of this number, from 1, if step + lag is a multiple of
        `every`.
        """
        if (step + self._lag) % every == 0:
            self._copy_now(step)

    def open(self, step: int) -> None:
        """Has `read` give the copy, of this step if there is none, until `close`; waits for the
        step that it is of.
        """
        copy = self._copy or self._copy_now(step)
        self.behind = step - self._made
        sizes = [v.shape.num_elements() for v in self._variables.values()]
        parts = np.split(copy.result(), np.cumsum(sizes)[:-1])
        self._found = dict(zip(self._variables, parts, strict=True))

    def close(self) -> None:
        """Has `read` give the variables again."""
        self.behind = 0
        self._found = {}

    def forget(self) -> None:
        """Drops the copy: the variables start again."""
        self._made = 0
        self._copy: concurrent.futures.Future[npt.NDArray[np.float64]] | None = None
        self.close()

    def read(self, name: str) -> npt.NDArray[np.float64]:
        """Returns the values of a variable, float64 [n]: from the copy between `open` and
        `close`.
        """
        found = self._found.get(name)
        return (
            np.atleast_1d(self._variables[name].numpy()).astype(np.float64)
            if found is None
            else found
        )

    def _copy_now(self, step: int) -> concurrent.futures.Future[npt.NDArray[np.float64]]:
        self._made, self._copy = step, self._fetching.submit(self._copied().numpy)
        return self._copy

    @tf.function(autograph=False)
    def _copied(self) -> tf.Tensor:
        return tf.concat(
            [tf.cast(tf.reshape(v, [-1]), tf.float64) for v in self._variables.values()], 0
        )
