"""Handles trainable variables that are overwritten instead of updated, such as those of float8.

`model.quantize("float8")` gives each Dense and EinsumDense three scales and three histories of the
largest absolute values. Keras's layers return their new values where other variables get gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import keras
import tensorflow as tf

from hybrid_imagenet import xla

_T = TypeVar("_T")


def is_overwritten(variable: keras.Variable) -> bool:
    """Returns whether the "gradient" of a variable is its new value."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


class Partition:
    """Divides trainable variables into those that a rule updates and those that are overwritten.

    New values are neither scaled, averaged, clipped nor part of a gradient norm. Over ranks and
    over micro-batches the largest one counts, as in Keras and in NVIDIA's Transformer Engine: the
    largest absolute value of all examples is the largest one of the largest of each part. The
    scales follow from earlier histories, so they are the same on all ranks already.

    Attributes:
      variables: all of them.
      updated: the variables that a rule updates, in their order.
      overwritten: the others, in their order.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        """Divides the variables."""
        self.variables = list(variables)
        self.updated, self.overwritten = self.split(self.variables)

    def split(self, values: Sequence[_T]) -> tuple[list[_T], list[_T]]:
        """Divides values, one per variable, into those of `updated` and those of `overwritten`."""
        updated: list[_T] = []
        overwritten: list[_T] = []
        for variable, value in zip(self.variables, values, strict=True):
            if is_overwritten(variable):
                overwritten.append(value)
            else:
                updated.append(value)
        return updated, overwritten

    def overflows(self, new_values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns 0 for each finite new value and infinity for each other one, float32 [m].

        A cast to float8 limits a value that is infinite, so gradients may be finite although a
        tensor has overflowed. Only the new values show it.

        Args:
          new_values: one per variable of `overwritten`, the same on every rank.
        """

        def overflows_of(*values: tf.Tensor) -> tf.Tensor:
            is_finite = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
            return tf.where(tf.stack(is_finite), 0.0, float("inf"))

        overflows: tf.Tensor = xla.compile_on_gpu(overflows_of)(*new_values)
        return overflows

    def overwrite(self, new_values: Sequence[tf.Tensor], is_taken: tf.Tensor) -> None:
        """Assigns new values to `overwritten`, unless the step is skipped.

        Args:
          new_values: as for `overflows`.
          is_taken: bool scalar.
        """
        variables = [variable.value for variable in self.overwritten]

        def assign(taken: tf.Tensor, *values: tf.Tensor) -> None:
            for variable, value in zip(variables, values, strict=True):
                # A mask, because on a GPU a branch would make the host wait for its condition.
                variable.assign(tf.where(taken, tf.cast(value, variable.dtype), variable))

        xla.compile_on_gpu(assign)(is_taken, *new_values)


def replace_nan(value: tf.Tensor) -> tf.Tensor:
    """Returns infinity instead of NaN, since a maximum with NaN may differ between ranks."""
    return tf.where(tf.math.is_nan(value), tf.cast(float("inf"), value.dtype), value)
