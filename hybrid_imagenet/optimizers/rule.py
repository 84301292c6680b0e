"""What an update rule gets of a step, and the names of the values that it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

WEIGHTS = "weights"  # the key of the weights among the values that a rule gets and gives
TRUST_RATIOS = "trust_ratios"  # and of what it may give besides, for the log


@dataclasses.dataclass(frozen=True)
class Before:
    """A step before its gradients are there. A vector [n] has one number for each trainable
    variable, in their order.

    At the end of a step a GPU should have few kernels to start. What gradients do not change is
    therefore computed before they are there (`GroupedOptimizer.before`), the rest when they are
    (`GroupedOptimizer.rule`).

    Attributes:
      hyper: the scalars of `base.HYPER_NAMES`.
      number: of this update, float32, from 1.
      counters: int64 scalars, the optimizer's `counters` before this step.
      weight_sums: gives the sums of squares of the weights, float32 [n].
    """

    hyper: Mapping[str, tf.Tensor]
    number: tf.Tensor
    counters: Sequence[tf.Tensor]
    weight_sums: Callable[[], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step whose gradients have been measured.

    Attributes:
      hyper: as in `Before`.
      before: what `GroupedOptimizer.before` gave.
      unscale: float32 scalar, 1 / loss scale: gradients and `square_sums` are as they came.
      square_sums: float32 [n], sums of squares of the gradients.
    """

    hyper: Mapping[str, tf.Tensor]
    before: Mapping[str, tf.Tensor]
    unscale: tf.Tensor
    square_sums: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Step:
    """A step with its gradients: of all variables as one vector, or of one variable.

    Attributes:
      hyper, unscale: as in `Measured`.
      before: what `GroupedOptimizer.before` and `GroupedOptimizer.layers` gave.
      decay: coefficients of weight decay, to multiply the weights by; the number 0 where there is
      none.
      scaled_decay: the same times the loss scale.
      spread: gives each value of a variable that variable's number in a vector [n]; of a scalar,
      the scalar.
      norms: gives each value of a variable the norm of all of that variable's values, as `spread`
      does.
      each: gives values that a function makes of (position, values of one variable in its shape),
        for each variable.
    """

    hyper: Mapping[str, tf.Tensor]
    before: Mapping[str, tf.Tensor]
    unscale: tf.Tensor
    decay: Any
    scaled_decay: Any
    spread: Callable[[tf.Tensor], tf.Tensor]
    norms: Callable[[tf.Tensor], tf.Tensor]
    each: Callable[[tf.Tensor, Callable[[int, tf.Tensor], tf.Tensor]], tf.Tensor]
