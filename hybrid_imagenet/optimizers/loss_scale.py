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

# Constants of a scale that follows the norm of the gradients. All but the last are exponents of 2.
#
# The largest number in FP16 is almost 2^16, so a gradient whose scaled norm is 2^12 overflows only
# if the next step makes it 16 times as large. The smallest normal number is 2^-14, and each of N
# ranks sends a gradient divided by N. So elements keep all bits down to N 2^-26 of the norm: 2^-21
# on 24 ranks, but 2^-14 on 4,096, where the smaller half of a large network's elements loses some.
_TARGET_NORM = 12.0
# A norm in this range is left alone, so that the scale changes rarely.
_LOWEST_NORM = 10.0
_HIGHEST_NORM = 13.0
# The first step, and the first one after an overflow, may raise the scale without a limit. Between
# them, gradients that are nearly 0, such as those of a batch without a loss, must not make the next
# one overflow.
_LARGEST_GROWTH = 2.0
# The norm is unknown after an overflow, so the scale falls in large steps.
_DROP_AFTER_OVERFLOW = -6.0
_SMALLEST_FOLLOWING_SCALE = 2.0**-24
# A float32 has 23 bits of mantissa, and its exponent is stored plus 127.
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127


class LossScale:
    """The factor by which the loss is multiplied before backpropagation, kept on the device.

    A fixed scale never changes. A dynamic scale changes in one of two ways:

    - For a model that computes in FP16, it is halved after a step whose gradients are not finite,
      and doubled after `growth_steps` finite steps in a row (Micikevicius et al.). So it finds the
      largest scale with which nothing inside the model overflows.
    - For other models, whose gradients are only sent in FP16, it follows the norm of the gradients
      (`follow_norm`). So no step is skipped to find the scale.

    Steps with non-finite gradients are skipped with any scale.

    Attributes (scalars, `keras.Variable`):
      scale: the factor, float32, a power of 2 if it is dynamic, so that it cancels exactly.
      good_steps: finite steps in a row. If the factor does not follow the norm, they are counted
        from its last change.
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
        self.follows_norm = False
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

    def follow_norm(self) -> None:
        """Makes the scale follow the norm of the gradients, from 1 in the first step.

        The scaled norm is kept between 2^10 and 2^14. Do not use it if the model computes in FP16,
        because the gradients of its activations may be larger than those of its weights.
        """
        self.follows_norm = True
        self.dynamic = True
        self.initial = 1.0
        self.scale.assign(self.initial)

    def follow_overflows(self) -> None:
        """Undoes `follow_norm`: the scale is halved after an overflow.

        It begins at its usual value, unless it was restored.
        """
        self.follows_norm = False
        self.initial = _INITIAL_SCALE
        if float(self.scale.numpy()) == 1.0:
            self.scale.assign(self.initial)

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

    def update(self, finite: tf.Tensor, square_sum: tf.Tensor) -> None:
        """Accounts for one step. The arguments must be the same on every rank.

        Args:
          finite: whether the step is taken, bool scalar.
          square_sum: of the means over ranks of the scaled gradients, float32 scalar.
        """
        values = self.next(finite, square_sum, *(v.value for v in self.variables))
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def next(
        self,
        finite: tf.Tensor,
        square_sum: tf.Tensor,
        scale: tf.Tensor,
        good: tf.Tensor,
        skipped: tf.Tensor,
        in_a_row: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the values of `variables` after a step.

        Args:
          finite: whether the step is taken, bool.
          square_sum: of the scaled gradients, float32, of the shape of `finite`.
          scale: factor before the step.
          good: `good_steps` before the step.
          skipped: `skipped_steps` before the step.
          in_a_row: `skipped_in_a_row` before the step.
        """
        skip = tf.cast(tf.logical_not(finite), tf.int64)
        skipped, in_a_row = skipped + skip, (in_a_row + skip) * skip
        if not self.dynamic:
            return tf.identity(scale), tf.identity(good), skipped, in_a_row
        if self.follows_norm:
            is_first = tf.equal(good, 0)
            factor = _power_of_two(_exponent_of_factor(finite, is_first, square_sum))
            scale = tf.clip_by_value(scale * factor, _SMALLEST_FOLLOWING_SCALE, _MAX_SCALE)
            return scale, (good + 1) * (1 - skip), skipped, in_a_row
        good = (good + 1) * (1 - skip)
        grow = tf.greater_equal(good, self.growth_steps)
        factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
        scale = tf.clip_by_value(scale * factor, 1.0, _MAX_SCALE)
        return scale, tf.where(grow, tf.zeros_like(good), good), skipped, in_a_row


def _exponent_of_factor(finite: tf.Tensor, is_first: tf.Tensor, square_sum: tf.Tensor) -> tf.Tensor:
    """Returns by which power of 2 a scale that follows the norm changes, float32.

    Args:
      finite: whether the step is taken, bool.
      is_first: whether no step, or a skipped one, comes before it, bool.
      square_sum: of the scaled gradients, float32.
    """
    # Not a logarithm, which processors may round differently: ranks must agree. And not integers,
    # for which TensorFlow would copy to the host.
    bits = tf.cast(tf.bitcast(square_sum, tf.int32), tf.float32)
    exponent = tf.floor(bits / 2.0**_MANTISSA_BITS) - _EXPONENT_BIAS
    norm_exponent = tf.floor(exponent / 2.0)
    is_in_range = (norm_exponent >= _LOWEST_NORM) & (norm_exponent <= _HIGHEST_NORM)
    change = _TARGET_NORM - norm_exponent
    change = tf.where(is_first, change, tf.minimum(change, _LARGEST_GROWTH))
    change = tf.where(is_in_range | tf.equal(square_sum, 0.0), 0.0, change)
    return tf.where(finite, change, _DROP_AFTER_OVERFLOW)


def _power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Returns 2^exponent exactly, float32, for whole exponents from -126 to 127."""
    bits = tf.cast((exponent + _EXPONENT_BIAS) * 2.0**_MANTISSA_BITS, tf.int32)
    return tf.bitcast(bits, tf.float32)
