"""Gives update rules the values of a step: hyperparameters, decay, and operations per layer.

The methods of an optimizer run in this order:

1. `GroupedOptimizer.prepare` gets a `PrepareContext` before the gradients arrive, and returns the
   terms of the step, a NamedTuple of the optimizer's own.
2. `GroupedOptimizer.scale_layers` gets the norms of the gradients, and returns `LayerRates`.
3. `GroupedOptimizer.update` gets gradients, weights, slots and an `UpdateContext`.

At the end of a step a GPU should have few kernels left to start, so whatever the gradients do not
change belongs in `prepare`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import tensorflow as tf

from hybrid_imagenet.optimizers.hyperparameters import StepHyperparameters

Terms = TypeVar("Terms")
"""Type of the terms that `GroupedOptimizer.prepare` of an optimizer returns."""


class NoSlots(NamedTuple):
    """Slots of an optimizer without state per weight."""


class Velocity(NamedTuple):
    """Slots of an optimizer with momentum."""

    velocity: tf.Tensor


class Moments(NamedTuple):
    """Slots of an optimizer with two moments of the gradient."""

    first_moment: tf.Tensor
    second_moment: tf.Tensor


class LayerRates(NamedTuple):
    """The learning rate of each layer.

    Attributes:
      learning_rates: Learning rate of each variable, float32 [n]; a scalar if all have the same.
      trust_ratios: Trust ratio of each kernel for the log, in the order of `kernel_indices`; None
        if the optimizer has none.
    """

    learning_rates: tf.Tensor
    trust_ratios: tf.Tensor | None = None


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


@dataclasses.dataclass(frozen=True)
class StepContext:
    """Values of a step that both `prepare` and `update` use.

    Attributes:
      hyperparameters: Scalars that the schedule has set.
    """

    hyperparameters: StepHyperparameters

    @property
    def learning_rate(self) -> tf.Tensor:
        """The global learning rate of this step, float32 scalar."""
        return self.hyperparameters.learning_rate

    @property
    def momentum(self) -> tf.Tensor:
        """The momentum of this step, float32 scalar."""
        return self.hyperparameters.momentum


@dataclasses.dataclass(frozen=True)
class PrepareContext(StepContext):
    """Values of a step before its gradients arrive.

    Attributes:
      step: 1-based index of this update, float32 scalar; skipped steps do not count.
      counters: The optimizer's `counters` before this step, int64 scalars.
      weight_square_sums: Returns the sum of squares of each variable, float32 [n].
    """

    step: tf.Tensor
    counters: Sequence[tf.Tensor]
    weight_square_sums: Callable[[], tf.Tensor]

    def weight_norms(self) -> tf.Tensor:
        """Returns the L2 norm |w| of each variable, float32 [n]."""
        return tf.sqrt(self.weight_square_sums())


@dataclasses.dataclass(frozen=True)
class UpdateContext(StepContext, Generic[Terms]):
    """Values of a step other than gradients, weights and slots.

    Attributes:
      terms: What `prepare` returned.
      layer_learning_rates: Learning rate of each variable, from `scale_layers`: float32 [n], or a
        scalar.
      unscale: 1 / loss scale, float32 scalar; gradients are still scaled.
      layers: Operations per variable.
      decay: Coefficient of weight decay, broadcast; None if no variable decays.
      scaled_decay: The same times the loss scale.
    """

    terms: Terms
    layer_learning_rates: tf.Tensor
    unscale: tf.Tensor
    layers: LayerOperations
    decay: Any
    scaled_decay: Any

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
