"""Packs all variables into one long vector, and back, in a few GPU kernels whatever their
number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm.packing import ROW_SIZE, round_up_to_rows

_ALIGNED = 16  # numbers in the 64 bytes at whose multiples TensorFlow's views begin and end


@dataclasses.dataclass(frozen=True)
class Packed:
    """Reduced gradients in the buckets in which they were sent.

    Attributes:
      buckets: floating-point vectors, of whole rows for each gradient.
      members: the positions of each bucket's variables, in the order of the vector.
    """

    buckets: Sequence[tf.Tensor]
    members: Sequence[Sequence[int]]


class Layout:
    """Places variables in a vector of rows of `ROW_SIZE` numbers; none shares a row, and rows are
    filled with zeros.

    A variable that starts at a row is aligned in memory, so taking the vector apart copies nothing:
    the pieces are views of it. Sums over variables are sums over rows, in an order that is always
    the same.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], order: Sequence[int]) -> None:
        """Lays out the variables of these shapes.

        Args:
          shapes: of all n variables.
          order: their positions in the order of the vector; a variable without elements may be left
            out.
        """
        self.shapes, self.order = [tuple(shape) for shape in shapes], list(order)
        self._counts = [math.prod(self.shapes[i]) for i in self.order]
        rows = np.array([round_up_to_rows(count) // ROW_SIZE for count in self._counts], np.int64)
        self.rows = int(rows.sum())
        self._owner = np.repeat(np.array(self.order, np.int64), rows)
        self._first = np.zeros(len(self.shapes), np.int64)
        self._rows_of = np.zeros(len(self.shapes), np.int64)
        self._first[self.order] = np.cumsum(rows) - rows
        self._rows_of[self.order] = rows

    def pack(self, tensors: Sequence[tf.Tensor] | Mapping[int, tf.Tensor]) -> tf.Tensor:
        """The variables' values by position, float32 in their shapes, as [rows, ROW_SIZE]."""
        pieces, zeros = (
            [],
            {
                short: tf.zeros([short])
                for short in {round_up_to_rows(count) - count for count in self._counts}
            },
        )
        for i, count in zip(self.order, self._counts, strict=True):
            pieces.append(_shaped(tensors[i], (count,)))
            if round_up_to_rows(count) > count:
                pieces.append(zeros[round_up_to_rows(count) - count])
        return tf.reshape(tf.concat(pieces, 0), [self.rows, ROW_SIZE])

    def unpack(
        self, rows: tf.Tensor, ends: Sequence[tf.Tensor] | None = None
    ) -> dict[int, tf.Tensor]:
        """From [rows, ROW_SIZE] the values by position of the variable, as views; copies of those
        in `odd`, or `ends`.
        """
        pieces = tf.split(
            tf.reshape(rows, [-1]), [round_up_to_rows(count) for count in self._counts]
        )
        copies = dict(zip(self.odd, self.ends(rows) if ends is None else ends, strict=True))
        found = {}
        for i, count, piece in zip(self.order, self._counts, pieces, strict=True):
            if i in copies:
                piece = copies[i]
            elif round_up_to_rows(count) > count:
                piece = tf.slice(piece, [0], [count])
            found[i] = _shaped(piece, self.shapes[i])
        return found

    def split(self, packed: Packed) -> dict[int, tf.Tensor]:
        """The gradients by position of the variable, float32; of those in a bucket."""
        found: dict[int, tf.Tensor] = {}
        for bucket, members in zip(packed.buckets, packed.members, strict=True):
            found |= Layout(self.shapes, members).unpack(
                tf.reshape(tf.cast(bucket, tf.float32), [-1, ROW_SIZE])
            )
        return found

    @property
    def odd(self) -> list[int]:
        """The variables whose ends are not aligned in memory, so that TensorFlow copies them out of
        the vector.
        """
        return [i for i, count in zip(self.order, self._counts, strict=True) if count % _ALIGNED]

    def ends(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """The values of the `odd` variables, flat, from [rows, ROW_SIZE]."""
        found = []
        for i in self.odd:
            part = tf.reshape(rows[self._first[i] : self._first[i] + self._rows_of[i]], [-1])
            found.append(part[: math.prod(self.shapes[i])])
        return found

    def each(self, rows: tf.Tensor, function: Callable[[int, tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """[rows, ROW_SIZE] of what a function makes of each variable's position and values, in its
        shape.
        """
        return self.pack({i: function(i, values) for i, values in self.unpack(rows).items()})

    def spread(self, vector: tf.Tensor) -> tf.Tensor:
        """From [n] to [rows, 1]: each row gets the number of its variable. A scalar stays one."""
        return vector if vector.shape.rank == 0 else tf.gather(vector, self._owner)[:, None]

    def spread_constant(self, vector: np.ndarray) -> np.ndarray:
        """`spread` of numbers that are known beforehand."""
        return vector[self._owner][:, None]

    def sums(self, rows: tf.Tensor) -> tf.Tensor:
        """The sums of squares of each variable in [rows, ROW_SIZE], [n]; in two kernels.

        Each row is summed, then the rows of each variable, filled up with zeros to the longest: no
        atomic additions, whose order would differ between ranks and runs.
        """
        by_row = tf.reduce_sum(tf.square(rows), 1)
        place = np.arange(max(int(self._rows_of.max(initial=0)), 1), dtype=np.int64)[None]
        own = place < self._rows_of[:, None]
        at = np.where(own, self._first[:, None] + place, 0)
        return tf.reduce_sum(tf.where(own, tf.gather(by_row, at), 0.0), 1)


def _shaped(values: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """The values in a shape; no operation where they have it, as most variables are vectors and
    tracing costs time.
    """
    return values if tuple(values.shape) == tuple(shape) else tf.reshape(values, shape)


def pack_each(grads: Sequence[tf.Tensor]) -> Packed:
    """Gradients that are not sent, float32, in a bucket each: most fill whole rows, so that nothing
    is copied.
    """
    members = [i for i, grad in enumerate(grads) if grad.shape.num_elements()]
    buckets = [tf.reshape(Layout([grads[i].shape], [0]).pack([grads[i]]), [-1]) for i in members]
    return Packed(buckets, [[i] for i in members])
