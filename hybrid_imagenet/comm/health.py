"""Counts what gradients lose in 16 bits, per layer and rank, at some steps, and gathers the counts on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm.communicator import Communicator, LayerHealth


class WireHealth:
    """Counts losses inside of the step; `collect` gathers them."""

    def __init__(self, names: Sequence[str], elements: Sequence[int], every: int) -> None:
        """Counts gradients of these names and numbers of elements at every `every`-th step, from the first on."""
        self._names, self._elements, self._every = list(names), list(elements), every
        # Made while the step is traced: a tf.function that sees variables appear would be traced a second time.
        apart = {"trainable": False, "experimental_enable_variable_lifting": False}
        self._counts = tf.Variable(tf.zeros([len(names), 4], tf.int64), **apart)
        with tf.device("CPU:0"):  # what decides whether to count; the counts stay where the gradients are
            self._step = tf.Variable(0, dtype=tf.int64, **apart)
            self._counted = tf.Variable(0, dtype=tf.int64, **apart)

    def observe(self, grads: Sequence[tf.Tensor], wires: Sequence[str], ranks: float = 1.0) -> None:
        """Adds this step's counts, if it is one of those to be counted.

        Args:
          grads: gradients as they were computed; in FP32 and divided by the number of ranks they are cast.
          wires: the type to which each is cast.
          ranks: their number.
        """

        counters = {wire: _counter(wire) for wire in set(wires)}

        def count() -> tf.Tensor:
            scaled = [tf.cast(tf.reshape(grad, [-1]), tf.float32) / ranks for grad in grads]
            rows = tf.stack([counters[wire](g) for g, wire in zip(scaled, wires, strict=True)])
            self._counts.assign_add(rows)
            with tf.device("CPU:0"):
                return self._counted.assign_add(1)

        with tf.device("CPU:0"):
            due = tf.equal(self._step % self._every, 0)
            self._step.assign_add(1)
        tf.cond(due, count, lambda: self._counted.read_value())

    def collect(self, communicator: Communicator) -> list[LayerHealth]:
        """Returns the counts of all ranks since the last call, by layer, and starts anew. Every rank calls it."""
        mine = [self._counts.numpy().tolist(), int(self._counted.numpy())]
        self._counts.assign(tf.zeros_like(self._counts))
        self._counted.assign(0)
        gathered = communicator.allgather_object(mine)
        counts = np.array([rows for rows, _ in gathered], np.int64).reshape(len(gathered), len(self._names), 4)
        steps = sum(counted for _, counted in gathered)
        result = []
        for i, name in enumerate(self._names):
            overflow, underflow, nonfinite, zeros = (int(x) for x in counts[:, i].sum(0))
            bad = np.flatnonzero(counts[:, i, 0] + counts[:, i, 2])
            first = int(bad[0]) if bad.size else None
            result.append(LayerHealth(name, self._elements[i] * steps, overflow, underflow, nonfinite, zeros, first))
        return result


def _counter(wire: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns `_losses` of a flat gradient for one type, traced once for all layers."""
    flat = tf.TensorSpec([None], tf.float32)
    return tf.function(lambda scaled: _losses(scaled, wire), input_signature=[flat], autograph=False)


def _losses(scaled: tf.Tensor, wire: str) -> tf.Tensor:
    """Counts overflow, underflow, non-finite values and zeros: int64 [4]."""
    before = _nonfinite_and_zeros(scaled)
    if wire == "float32":
        return tf.concat([[0, 0], before], 0)
    # The cast turns neither an infinite value nor a zero into anything else.
    after = _nonfinite_and_zeros(tf.cast(scaled, wire))
    return tf.concat([after - before, before], 0)


def _nonfinite_and_zeros(values: tf.Tensor) -> tf.Tensor:
    found = tf.logical_not(tf.math.is_finite(values)), tf.equal(values, 0)
    return tf.stack([tf.math.count_nonzero(each) for each in found])
