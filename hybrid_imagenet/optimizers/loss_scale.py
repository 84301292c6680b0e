"""Loss scaling for FP16 gradients.

Reference: Lu et al. §2.2.2; Micikevicius et al., Mixed Precision Training.
"""

from __future__ import annotations

import keras
import tensorflow as tf

# The default maximum of NVIDIA's Apex.
_MAX_SCALE = 2.0**24
# FP16 ends at 65504, so gradients of 1e4 may overflow without a scale, and a scale below 1 lets
# them pass.
_MIN_SCALE = 2.0**-24

# A dynamic scale skips up to about 16 steps before it is small enough, which is no fault.
_EXPECTED_SKIPPED_STEPS = 16
_MAX_SKIPPED_FRACTION = 0.05


def many_skipped_steps(skipped: int, steps: int) -> str | None:
    """Returns a warning if more steps were skipped than a dynamic scale should skip, or None.

    Args:
      skipped: Number of steps that were skipped.
      steps: Number of all steps.
    """
    if skipped <= max(_EXPECTED_SKIPPED_STEPS, _MAX_SKIPPED_FRACTION * steps):
        return None
    return (
        f"{skipped} of {steps} steps were skipped, because their gradients are not finite in FP16."
        " Batches with large losses are lost. Clip or scale the loss, or compute in FP32 or BF16."
    )


class LossScale:
    """The factor by which the loss is multiplied before backpropagation, kept on the device.

    A fixed scale never changes. A dynamic scale is halved after a step whose gradients are not
    finite, and doubled after `growth_steps` finite steps in a row, so it finds the largest scale
    with which nothing overflows (Micikevicius et al.). Steps with non-finite gradients are skipped
    with any scale.

    Attributes (scalars, `keras.Variable`):
      scale: the factor, float32, a power of 2 if it is dynamic, so that it cancels exactly.
      good_steps: finite steps in a row since the last change of a dynamic scale.
      skipped_steps: all steps skipped so far.
      skipped_in_a_row: steps skipped since the last one that was taken.
    """

    def __init__(self, initial: float = 1.0, *, dynamic: bool = False, growth_steps: int = 2000):
        """Creates the state.

        Raises:
          ValueError: If `initial` or `growth_steps` is not positive.
        """
        if initial <= 0 or growth_steps <= 0:
            raise ValueError(
                f"loss scale {initial} and growth steps {growth_steps} must be positive"
            )
        self.initial = initial
        self.dynamic = dynamic
        self.growth_steps = growth_steps
        self._loaded_scale: float | None = None
        self.scale = keras.Variable(initial, dtype="float32", trainable=False, name="scale")
        # int64: TensorFlow keeps int32 variables on the host, for which the device would be waited
        # for at every step.
        self.good_steps = keras.Variable(0, dtype="int64", trainable=False, name="good_steps")
        self.skipped_steps = keras.Variable(0, dtype="int64", trainable=False, name="skipped_steps")
        self.skipped_in_a_row = keras.Variable(
            0, dtype="int64", trainable=False, name="skipped_in_a_row"
        )

    @property
    def is_one(self) -> bool:
        """Whether the loss is not scaled."""
        return not self.dynamic and self.initial == 1.0

    def configure(self, initial: float, *, dynamic: bool) -> None:
        """Changes the kind of the scale, outside graphs.

        It begins at `initial`, or at the value of a file if it is dynamic.
        """
        if (initial, dynamic) == (self.initial, self.dynamic):
            return
        self.initial = initial
        self.dynamic = dynamic
        has_loaded_value = dynamic and self._loaded_scale is not None
        self.scale.assign(self._loaded_scale if has_loaded_value else initial)

    def keep_setting(self) -> None:
        """Keeps a fixed scale, after `variables` were loaded from a file; waits for a GPU.

        The file may be of a training with another scale. If the scale becomes dynamic once the
        model is known, it begins at the value of the file.
        """
        loaded_scale = float(self.scale.numpy())
        if loaded_scale != 1.0:
            self._loaded_scale = loaded_scale
        if not self.dynamic:
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

    def update(self, finite: tf.Tensor) -> None:
        """Accounts for one step.

        Args:
          finite: Whether the step is taken, bool scalar, the same on every rank.
        """
        values = self.next(finite, *(v.value for v in self.variables))
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def next(
        self,
        finite: tf.Tensor,
        scale: tf.Tensor,
        good: tf.Tensor,
        skipped: tf.Tensor,
        in_a_row: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the values of `variables` after a step.

        Args:
          finite: Whether the step is taken, bool.
          scale: Factor before the step.
          good: `good_steps` before the step.
          skipped: `skipped_steps` before the step.
          in_a_row: `skipped_in_a_row` before the step.
        """
        skip = tf.cast(tf.logical_not(finite), tf.int64)
        skipped, in_a_row = skipped + skip, (in_a_row + skip) * skip
        if not self.dynamic:
            return tf.identity(scale), tf.identity(good), skipped, in_a_row
        good = (good + 1) * (1 - skip)
        grow = tf.greater_equal(good, self.growth_steps)
        factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
        scale = tf.clip_by_value(scale * factor, _MIN_SCALE, _MAX_SCALE)
        return scale, tf.where(grow, tf.zeros_like(good), good), skipped, in_a_row
