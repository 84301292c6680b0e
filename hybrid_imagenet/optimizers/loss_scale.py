"""Loss scaling for FP16 gradients.

Reference: Lu et al. §2.2.2; Micikevicius et al., Mixed Precision Training.
"""

from __future__ import annotations

import keras
import tensorflow as tf

# The scale that Keras begins with.
_INITIAL_SCALE = 2.0**15
# The default maximum of NVIDIA's Apex.
_MAX_SCALE = 2.0**24


class LossScale:
    """The factor by which the loss is multiplied before backpropagation, kept on the device.

    A dynamic scale is halved after a step whose gradients are not finite, and doubled after
    `growth_steps` finite steps in a row. A fixed scale never changes; steps with non-finite
    gradients are skipped all the same.

    Attributes (scalars, `keras.Variable`):
      scale: the factor, float32; a dynamic one is within [1, 2^24].
      good_steps: finite steps since the factor last changed.
      skipped_steps: all steps skipped so far.
      skipped_in_a_row: steps skipped since the last one that was taken.
    """

    def __init__(self, initial: float = 1.0, *, dynamic: bool = False, growth_steps: int = 2000):
        """Creates the state.

        Raises:
          ValueError: if `initial` or `growth_steps` is not positive.
        """
        if initial <= 0 or growth_steps <= 0:
            raise ValueError(
                f"loss scale {initial} and growth steps {growth_steps} must be positive"
            )
        self.initial = initial
        self.dynamic = dynamic
        self.growth_steps = growth_steps
        self.scale = keras.Variable(initial, dtype="float32", trainable=False, name="scale")
        # int64: TensorFlow keeps int32 variables on the host, for which the device would be waited
        # for at every step.
        self.good_steps = keras.Variable(0, dtype="int64", trainable=False, name="good_steps")
        self.skipped_steps = keras.Variable(0, dtype="int64", trainable=False, name="skipped_steps")
        self.skipped_in_a_row = keras.Variable(
            0, dtype="int64", trainable=False, name="skipped_in_a_row"
        )

    @classmethod
    def of(cls, value: str | float) -> LossScale:
        """Returns the loss scale for `dynamic` or a number.

        Raises:
          ValueError: for another word, or as `__init__`.
        """
        return cls(_INITIAL_SCALE, dynamic=True) if value == "dynamic" else cls(float(value))

    @property
    def variables(self) -> list[keras.Variable]:
        """All state, in a fixed order."""
        return [self.scale, self.good_steps, self.skipped_steps, self.skipped_in_a_row]

    @property
    def counters(self) -> list[keras.Variable]:
        """The int64 counters of the state: all of `variables` but the scale."""
        return [self.good_steps, self.skipped_steps, self.skipped_in_a_row]

    def multiply(self, loss: tf.Tensor) -> tf.Tensor:
        return loss * self.scale.value

    def update(self, finite: tf.Tensor) -> None:
        """Counts one step; `finite` (bool scalar) must be the same on every rank."""
        values = [variable.value for variable in self.variables]
        new_values = self.next(finite, *values)
        for variable, new_value in zip(self.variables, new_values, strict=True):
            variable.assign(new_value)

    def next(
        self,
        finite: tf.Tensor,
        scale: tf.Tensor,
        good: tf.Tensor,
        skipped: tf.Tensor,
        in_a_row: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the values of `variables` after a step, from those before it.

        Args:
          finite: whether the step is taken, bool. It may be a vector, of which each element is a
            step of its own, with values of the same shape.
          scale: value of `scale`.
          good: value of `good_steps`.
          skipped: value of `skipped_steps`.
          in_a_row: value of `skipped_in_a_row`.
        """
        skip = tf.cast(tf.logical_not(finite), tf.int64)
        new_skipped = skipped + skip
        new_in_a_row = (in_a_row + skip) * skip
        if not self.dynamic:
            return tf.identity(scale), tf.identity(good), new_skipped, new_in_a_row
        finite_steps = (good + 1) * (1 - skip)
        grows = tf.greater_equal(finite_steps, self.growth_steps)
        factor = tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5)
        new_scale = tf.clip_by_value(scale * factor, 1.0, _MAX_SCALE)
        new_good = tf.where(grows, tf.zeros_like(finite_steps), finite_steps)
        return new_scale, new_good, new_skipped, new_in_a_row
