"""Scalars that a schedule sets before each step, such as the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf


class StepHyperparameters(NamedTuple):
    """Scalars that a schedule sets before each step, float32, in the order in which they are kept.

    Attributes:
      learning_rate: Global learning rate.
      momentum: Momentum.
      phase: 1 in the second of two phases, else 0; selects between two update rules.
      lower_bound: Lower bound of AdaBound's rate.
      upper_bound: Upper bound of AdaBound's rate.
      trust_ratio_exponent: Exponent s of the trust ratio: 1 if LARS alone sets the rate of a layer.
    """

    learning_rate: tf.Tensor
    momentum: tf.Tensor
    phase: tf.Tensor
    lower_bound: tf.Tensor
    upper_bound: tf.Tensor
    trust_ratio_exponent: tf.Tensor

    @classmethod
    def from_vector(cls, vector: tf.Tensor) -> StepHyperparameters:
        """Splits the vector in which the scalars are stored."""
        return cls(*tf.unstack(vector, len(HYPERPARAMETERS)))


HYPERPARAMETERS = StepHyperparameters._fields
"""Names of the scalars that a schedule sets."""


class Hyperparameters:
    """Scalars that a schedule sets before each step.

    They are one small float32 variable on the CPU, so that setting all of them is one assignment.
    """

    def __init__(self, **values: float):
        """Starts from the values that are passed; the others are 0."""
        self.names = HYPERPARAMETERS
        self._values = np.array([values.get(name, 0.0) for name in self.names], np.float32)
        self._index = {name: i for i, name in enumerate(self.names)}
        with tf.device("CPU:0"):
            self._variable = tf.Variable(self._values, trainable=False, name="hyper")

    def assign(self, values: Mapping[str, float]) -> None:
        """Sets the named scalars and keeps the others.

        Raises:
          KeyError: For a name that is not in `names`.
        """
        changed = False
        for name, value in values.items():
            index = self._index[name]
            new = np.float32(value)
            if self._values[index] != new:
                self._values[index] = new
                changed = True
        if changed:
            # Variable.assign takes twice as long. Without the device the constant would go to a GPU
            # and come back.
            with tf.device("CPU:0"):
                constant = tf.constant(self._values.copy())
                tf.raw_ops.AssignVariableOp(resource=self._variable.handle, value=constant)

    def vector(self) -> tf.Tensor:
        """Returns the scalars in the order of `names`, on the CPU.

        Inside a graph they are read at every execution.
        """
        with tf.device("CPU:0"):
            return self._variable.read_value()

    def __getitem__(self, name: str) -> float:
        return float(self._values[self._index[name]])


class HasLearningRate(Protocol):
    """An optimizer whose learning rate is one of its hyperparameters."""

    hyperparameters: Hyperparameters
    learning_rate: Any


class LearningRate(float):
    """The learning rate of an optimizer: a number that has `assign` like a variable of Keras."""

    _optimizer: HasLearningRate

    def __new__(cls, optimizer: HasLearningRate) -> LearningRate:
        """Returns the present value."""
        value = super().__new__(cls, optimizer.hyperparameters["learning_rate"])
        value._optimizer = optimizer
        return value

    def assign(self, value: Any) -> None:
        """Sets the learning rate of the optimizer; this number stays as it is."""
        self._optimizer.learning_rate = value

    def numpy(self) -> np.float32:
        """Returns the value."""
        return np.float32(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy must not contain a copy of the optimizer.
        return float, (float(self),)
