"""Packs all variables into one vector and back, in a few GPU kernels whatever their number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm.packing import ROW_SIZE, round_up_to_rows

# TensorFlow's views begin and end at multiples of 64 bytes, which are 16 float32 numbers.
_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class Packed:
    """Reduced gradients in the buckets in which they were sent.

    Attributes:
      buckets: Floating-point vectors; each gradient fills whole rows of `ROW_SIZE` numbers.
      members: The positions of each bucket's variables, in the order of the vector.
    """

    buckets: Sequence[tf.Tensor]
    members: Sequence[Sequence[int]]

    @property
    def order(self) -> list[int]:
        """Positions of the variables of all buckets, in the order of the vectors."""
        return [position for bucket_members in self.members for position in bucket_members]


class Layout:
    """Places variables in a vector of rows of `ROW_SIZE` numbers.

    No two variables share a row, and rows are filled up with zeros. A variable that starts at a row
    is aligned in memory, so unpacking the vector copies nothing: the values are views of it.
    Sums over variables are sums over rows, in an order that is always the same.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], order: Sequence[int]) -> None:
        """Lays out the variables of these shapes.

        Args:
          shapes: Shapes of all n variables.
          order: Their positions in the order of the vector; variables without elements may be
            missing.
        """
        self.shapes = [tuple(shape) for shape in shapes]
        self.order = list(order)
        self._counts = [math.prod(self.shapes[i]) for i in self.order]
        self._padded_counts = [round_up_to_rows(count) for count in self._counts]
        rows = np.array([count // ROW_SIZE for count in self._padded_counts], np.int64)
        self.rows = int(rows.sum())
        # For each row the position of its variable, and for each variable its first row and number
        # of rows.
        self._variable_of_row = np.repeat(np.array(self.order, np.int64), rows)
        self._first_row = np.zeros(len(self.shapes), np.int64)
        self._first_row[self.order] = np.cumsum(rows) - rows
        self._num_rows = np.zeros(len(self.shapes), np.int64)
        self._num_rows[self.order] = rows

    def pack(self, tensors: Sequence[tf.Tensor] | Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Returns variables as [rows, ROW_SIZE].

        Args:
          tensors: float32 values by position of the variable, in its shape.
        """
        paddings = {
            padded - count for count, padded in zip(self._counts, self._padded_counts, strict=True)
        }
        zeros = {length: tf.zeros([length]) for length in paddings}
        pieces = []
        for i, count, padded in zip(self.order, self._counts, self._padded_counts, strict=True):
            pieces.append(_reshaped(tensors[i], (count,)))
            if padded > count:
                pieces.append(zeros[padded - count])
        return tf.reshape(tf.concat(pieces, 0), [self.rows, ROW_SIZE])

    def unpack(
        self, rows: tf.Tensor, unaligned_values: Sequence[tf.Tensor] | None = None
    ) -> dict[int, tf.Tensor]:
        """Returns the values in [rows, ROW_SIZE] by position of the variable, in its shape.

        They are views, except for copies of the variables in `unaligned`.

        Args:
          rows: float32 [rows, ROW_SIZE].
          unaligned_values: Result of the method `unaligned_values`, if it exists already.
        """
        return self._unpack_vector(tf.reshape(rows, [-1]), unaligned_values)

    def _unpack_vector(
        self, vector: tf.Tensor, unaligned_values: Sequence[tf.Tensor] | None = None
    ) -> dict[int, tf.Tensor]:
        """Does the same as `unpack` for the rows as one vector.

        A single operation splits off the variables and what fills up their rows, because tracing a
        slice of each of the many small variables takes longer.
        """
        sizes = []
        for count, padded in zip(self._counts, self._padded_counts, strict=True):
            # A piece that is not aligned would make TensorFlow copy all of them.
            is_aligned = count % _ALIGNMENT == 0
            sizes += [count, padded - count] if is_aligned else [padded, 0]
        pieces = tf.split(vector, sizes)[::2]
        copies: dict[int, tf.Tensor] = {}
        if unaligned_values is not None:
            copies = dict(zip(self.unaligned, unaligned_values, strict=True))
        values = {}
        for i, count, piece in zip(self.order, self._counts, pieces, strict=True):
            if i in copies:
                piece = copies[i]
            elif count % _ALIGNMENT:
                piece = tf.slice(piece, [0], [count])
            values[i] = _reshaped(piece, self.shapes[i])
        return values

    def unpack_buckets(self, packed: Packed) -> dict[int, tf.Tensor]:
        """Returns the gradients in buckets by position of the variable, float32, in its shape."""
        gradients: dict[int, tf.Tensor] = {}
        for bucket, members in zip(packed.buckets, packed.members, strict=True):
            vector = tf.cast(bucket, tf.float32)
            gradients |= Layout(self.shapes, members)._unpack_vector(vector)
        return gradients

    @property
    def unaligned(self) -> list[int]:
        """Positions of the variables whose ends are not aligned in memory.

        They cannot be views, so TensorFlow copies them out of the vector.
        """
        return [i for i, count in zip(self.order, self._counts, strict=True) if count % _ALIGNMENT]

    def unaligned_values(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the values of the variables in `unaligned`, flat, from [rows, ROW_SIZE]."""
        values = []
        for i in self.unaligned:
            first = self._first_row[i]
            variable = tf.reshape(rows[first : first + self._num_rows[i]], [-1])
            values.append(variable[: math.prod(self.shapes[i])])
        return values

    def map(self, rows: tf.Tensor, function: Callable[[int, tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Applies a function of (position, values in the variable's shape) to each variable.

        Returns:
          The results as [rows, ROW_SIZE].
        """
        return self.pack({i: function(i, values) for i, values in self.unpack(rows).items()})

    def broadcast(self, vector: tf.Tensor) -> tf.Tensor:
        """Broadcasts [n] to [rows, 1]: each row gets the number of its variable.

        A scalar is returned as it is.
        """
        if vector.shape.rank == 0:
            return vector
        return tf.gather(vector, self._variable_of_row)[:, None]

    def broadcast_constant(self, vector: np.ndarray) -> np.ndarray:
        """Does the same as `broadcast` for numbers that are known when the graph is built."""
        return vector[self._variable_of_row][:, None]

    def norms(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the L2 norm of each variable in [rows, ROW_SIZE], broadcast to its rows."""
        return self.broadcast(tf.sqrt(self.square_sums(rows)))

    def square_sums(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the sum of squares of each variable in [rows, ROW_SIZE] as [n], in two kernels.

        Each row is summed first. Then the sums of the rows of each variable are gathered, filled up
        with zeros to the largest number of rows, and summed. So there are no atomic additions,
        whose order would differ between ranks and runs.
        """
        by_row = tf.reduce_sum(tf.square(rows), 1)
        longest = max(int(self._num_rows.max(initial=0)), 1)
        index = np.arange(longest, dtype=np.int64)[None]
        exists = index < self._num_rows[:, None]
        row = np.where(exists, self._first_row[:, None] + index, 0)
        return tf.reduce_sum(tf.where(exists, tf.gather(by_row, row), 0.0), 1)


def _reshaped(values: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Reshapes values, without an operation if they have the shape already.

    Most variables are vectors, and tracing an operation for each costs time.
    """
    return values if tuple(values.shape) == tuple(shape) else tf.reshape(values, shape)


def pack_each(grads: Sequence[tf.Tensor]) -> Packed:
    """Packs each float32 gradient into its own bucket, for an update without other ranks.

    Most gradients fill whole rows, so nothing is copied.
    """
    members = [i for i, grad in enumerate(grads) if grad.shape.num_elements()]
    buckets = []
    for i in members:
        rows = Layout([grads[i].shape], [0]).pack([grads[i]])
        buckets.append(tf.reshape(rows, [-1]))
    return Packed(buckets, [[i] for i in members])
