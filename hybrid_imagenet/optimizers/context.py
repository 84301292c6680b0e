"""Gives update rules the values of a step: hyperparameters, decay, and operations per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tensorflow as tf

HYPERPARAMETERS = (
    "learning_rate",
    "momentum",
    "phase",
    "lower_bound",
    "upper_bound",
    "lars_share",
)
"""Scalars that a schedule sets before each step, in the order in which they are stored."""
TRUST_RATIOS = "trust_ratios"
"""The key under which `GroupedOptimizer.scale_layers` may return ratios for the log."""


class LayerOperations(Protocol):
    """Operations that know where one trainable variable ends and the next begins.

    `Layout` implements them for all variables as one vector, `per_variable.OneVariable` for one
    variable. A vector [n] holds one number per trainable variable, in their order.
    """

    def broadcast(self, vector: tf.Tensor) -> tf.Tensor:
        """Broadcasts one number per variable, [n], to the elements of that variable.

        A scalar is returned as it is.
        """

    def norms(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the L2 norm of each variable's values, broadcast as in `broadcast`.

        In the packed form a row of a variable is filled up with zeros. The values must be 0 there
        too, so they must be 0 if gradient, weight and state are 0.
        """

    def map(self, values: tf.Tensor, function: Callable[[int, tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Applies a function of (position of the variable, values in its shape) to each variable.

        Returns:
          The results in the form of `values`.
        """


def _only_in_prepare() -> tf.Tensor:
    raise RuntimeError("weight_square_sums is available in prepare only")


@dataclasses.dataclass
class UpdateContext:
    """One step, as the methods of an optimizer see it.

    An optimizer's methods run in this order. Each can use:

    1. `GroupedOptimizer.prepare`, before the gradients arrive: `hyperparameters`, `step`,
       `counters` and `weight_square_sums`.
    2. `GroupedOptimizer.scale_layers`, when the gradients' norms are known: `hyperparameters`,
       `prepared`, `unscale` and `gradient_square_sums`.
    3. `GroupedOptimizer.update`, on values: `hyperparameters`, `prepared`, `unscale`, `layers` and
       the two methods that add weight decay.

    At the end of a step a GPU should have few kernels left to start, so whatever the gradients do
    not change belongs in `prepare`.

    Attributes:
      hyperparameters: float32 scalars by name, see `HYPERPARAMETERS`.
      step: float32 scalar, the 1-based index of this update; skipped steps do not count.
      counters: int64 scalars, the optimizer's `counters` before this step.
      weight_square_sums: returns the sum of squares of each variable, float32 [n].
      prepared: what `prepare` returned; in `update` also what `scale_layers` returned.
      unscale: float32 scalar, 1 / loss scale; gradients and their square sums are still scaled.
      gradient_square_sums: sum of squares of each gradient, clipped if it is, float32 [n].
      layers: operations per variable.
      decay: coefficient of weight decay, broadcast; None if no variable decays.
      scaled_decay: the same times the loss scale.
    """

    hyperparameters: Mapping[str, tf.Tensor]
    step: Any = None
    counters: Sequence[tf.Tensor] = ()
    weight_square_sums: Callable[[], tf.Tensor] = _only_in_prepare
    prepared: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    unscale: Any = None
    gradient_square_sums: Any = None
    layers: Any = None
    decay: Any = None
    scaled_decay: Any = None

    @property
    def learning_rate(self) -> tf.Tensor:
        """The global learning rate of this step, float32 scalar."""
        return self.hyperparameters["learning_rate"]

    @property
    def momentum(self) -> tf.Tensor:
        """The momentum of this step, float32 scalar."""
        return self.hyperparameters["momentum"]

    def add_decay(self, value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Returns value + decay * weight, for an unscaled gradient or another direction."""
        if self.decay is None:
            return value
        return value + self.decay * weight

    def add_scaled_decay(self, grad: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Returns grad + loss scale * decay * weight, for a gradient that is still scaled.

        Rules that multiply the gradient by a rate anyway save a multiplication per element this
        way: the rate takes in `unscale`.
        """
        if self.scaled_decay is None:
            return grad
        return grad + self.scaled_decay * weight
