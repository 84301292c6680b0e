"""Runs an optimizer's update rule on all variables: the part that both executors share.

A step goes through these methods:

    _prepare           before the gradients arrive: 1 / loss scale, weight decay, norms of weights
    _decide            from the gradients' square sums: one decision, the next loss scale, counters
    _apply_rule        new weights, slots and averages from old ones, by `GroupedOptimizer.update`
    _apply_constraints the constraints of weights

`packed.PackedExecutor` has all variables in one vector, as suits a GPU; `per_variable` updates each
large variable in place, as suits a CPU. docs/dev/measurements.md has the measurements. Both
compile the rule with XLA. On a GPU none of them has a branch, because a branch makes the host wait
for its condition: if the gradients are not finite, a mask keeps each old value.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api, xla
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.context import (
    PrepareContext,
    UpdateContext,
)
from hybrid_imagenet.optimizers.hyperparameters import StepHyperparameters
from hybrid_imagenet.optimizers.layout import Layout, Packed
from hybrid_imagenet.optimizers.loss_scale import LossScale

WEIGHTS = "weights"
"""The key of the weights among the values of a step; the others are slots and `AVERAGE`."""
AVERAGE = "average"
"""The key of the averaged weights."""

Values = dict[str, Any]

# On a GPU, each scalar that is computed from other scalars costs one kernel. If the scalars are
# sums over vectors of the same length instead, XLA computes all of them in one kernel. So each
# scalar is kept in lane 0 of a vector of this many lanes.
_LANES = 8
_IS_LANE_ZERO = np.arange(_LANES) == 0


class StepScalars(NamedTuple):
    """Scalars that a step reads from variables.

    Attributes:
      hyperparameters: float32 [6], see `StepHyperparameters.from_vector`.
      loss_scale: float32.
      loss_scale_counters: int64, as in `LossScale.variables`.
      step_counters: int64; the applied updates, then the optimizer's `counters`.
    """

    hyperparameters: tf.Tensor
    loss_scale: tf.Tensor
    loss_scale_counters: list[tf.Tensor]
    step_counters: list[tf.Tensor]


class Prepared(NamedTuple):
    """Values of a step that do not depend on its gradients.

    Attributes:
      unscale: 1 / loss scale.
      scaled_decay: Coefficient of coupled weight decay times the loss scale, one per variable [n]
        or per row; None if nothing decays.
      weight_factor: What decoupled weight decay multiplies the weights by, [n]; None without it.
      average_rate: How far the average moves to the new weights, 0 to 1; None without an average.
      terms: What the optimizer's `prepare` returned.
    """

    unscale: tf.Tensor
    scaled_decay: tf.Tensor | None
    weight_factor: tf.Tensor | None
    average_rate: tf.Tensor | None
    terms: Any


class Outcome(NamedTuple):
    """Values of a step that follow from the square sums of its gradients.

    Attributes:
      is_finite: Whether the step is taken, the same on all ranks.
      loss_scale, loss_scale_counters, step_counters: New values of those in `StepScalars`.
      gradient_norm: L2 norm of all gradients, unscaled, before clipping.
      gradient_square_sums: Square sum of each gradient, still scaled, [n].
      trust_ratios: Trust ratios for the log; None if the optimizer has none.
    """

    is_finite: tf.Tensor
    loss_scale: tf.Tensor
    loss_scale_counters: list[tf.Tensor]
    step_counters: list[tf.Tensor]
    gradient_norm: tf.Tensor
    gradient_square_sums: tf.Tensor
    trust_ratios: tf.Tensor | None


class GradientScaling(NamedTuple):
    """Factors by which the rule multiplies gradients, from their square sums.

    Attributes:
      clip_factor: Factor of all gradients, at most 1; None without clipping.
      layer_learning_rates: Learning rate of each variable, [n], or a scalar.
    """

    clip_factor: tf.Tensor | None
    layer_learning_rates: tf.Tensor


class UpdateExecutor(abc.ABC):
    """Updates weights, slots, averages, counters and loss scale from reduced gradients."""

    def __init__(
        self,
        optimizer: Any,
        loss_scale: LossScale,
        average: WeightAverage | None = None,
    ) -> None:
        """Stores the optimizer, its loss scale and its weight average.

        Args:
          optimizer: A `GroupedOptimizer`, which gives the update rule and owns the slots.
          loss_scale: Factor of the gradients.
          average: Moving average of the weights; None without one.
        """
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._average = average
        # Without XLA the same operations run one by one.
        self._jit_compile = xla.supported()
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def apply(self, reduced: Packed) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes one step inside a graph, from gradients that are still scaled.

        Args:
          reduced: The gradients.

        Returns:
          The square sums of the scaled gradients, float32 [n], and the norm of all unscaled ones.
        """
        shapes = [tuple(v.shape) for v in private_api.trainable_variables(self._optimizer)]
        scalars = self._read_scalars()
        outcome = self._run(Layout(shapes, reduced.order), reduced, scalars)
        self._apply_constraints(outcome.is_finite, scalars)
        self._assign_scalars(outcome)
        return outcome.gradient_square_sums, outcome.gradient_norm

    @abc.abstractmethod
    def _run(self, layout: Layout, reduced: Packed, scalars: StepScalars) -> Outcome:
        """Updates the variables; returns the scalars that `apply` assigns."""

    def _read_scalars(self) -> StepScalars:
        return StepScalars(
            self._optimizer.hyperparameters.vector(),
            self._loss_scale.scale.value,
            [v.value for v in self._loss_scale.counters],
            [v.value for v in self._step_counters()],
        )

    def _assign_scalars(self, outcome: Outcome) -> None:
        self._loss_scale.scale.value.assign(outcome.loss_scale)
        counters = [*self._loss_scale.counters, *self._step_counters()]
        values = [*outcome.loss_scale_counters, *outcome.step_counters]
        for counter, value in zip(counters, values, strict=True):
            counter.value.assign(value)
        if outcome.trust_ratios is not None:
            self._optimizer.trust_ratios.value.assign(outcome.trust_ratios)

    def _apply_constraints(self, is_finite: tf.Tensor, scalars: StepScalars) -> None:
        """Applies the constraints of weights if the step is taken.

        They are not part of the compiled programs, because a constraint may be any function, and
        XLA does not compile all of them.

        Args:
          is_finite: Whether the step is taken.
          scalars: Scalars of this step, whose variables have not been assigned yet.
        """
        for position, weight in enumerate(private_api.trainable_variables(self._optimizer)):
            if weight.constraint is None:
                continue
            before = weight.value.read_value()
            after = tf.where(is_finite, weight.constraint(weight), before)
            weight.assign(after)
            if self._average is not None:
                # The rule has moved the average towards the weight before its constraint.
                rate = self._average.rate(_update_index(scalars))
                self._average.variables[position].assign_add(rate * (after - before))

    def _step_counters(self) -> list[keras.Variable]:
        return [self._optimizer.iterations, *self._optimizer.counters()]

    def _variables(self) -> dict[str, Sequence[keras.Variable]]:
        """Returns the weights, each slot and the averages, in the order of the weights."""
        variables: dict[str, Sequence[keras.Variable]] = {
            WEIGHTS: private_api.trainable_variables(self._optimizer)
        }
        for slot in self._optimizer.Slots._fields:
            variables[slot] = getattr(self._optimizer, slot)
        if self._average is not None:
            variables[AVERAGE] = self._average.variables
        return variables

    def _compiled(self, key: tuple[Any, ...], function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function that was compiled first under this key, or compiles this one."""
        if key not in self._programs:
            self._programs[key] = tf.function(
                function, autograph=False, jit_compile=self._jit_compile
            )
        return self._programs[key]

    def _prepare(
        self,
        scalars: StepScalars,
        weight_square_sums: Callable[[], tf.Tensor],
        decay: np.ndarray,
    ) -> Prepared:
        """Computes the terms that do not depend on the gradients.

        Args:
          scalars: Scalars of this step.
          weight_square_sums: Returns the square sums of the weights [n].
          decay: Coefficients of coupled decay, one per variable or per row.
        """
        step = _update_index(scalars)
        hyperparameters = StepHyperparameters.from_vector(scalars.hyperparameters)
        weight_factor = None
        if self._optimizer.decoupled_decay_rate:
            coefficients = self._optimizer.decay_coefficients(self._optimizer.decoupled_decay_rate)
            decay_factor = self._optimizer.decoupled_decay_factor(hyperparameters)
            weight_factor = 1.0 - coefficients * decay_factor
        scaled_decay = None
        if decay.any():
            is_on = self._optimizer.decay_is_on(hyperparameters)
            scaled_decay = decay * (is_on * scalars.loss_scale)

        def decayed_square_sums() -> tf.Tensor:
            # The rule sees the weights after decoupled decay.
            if weight_factor is None:
                return weight_square_sums()
            return weight_square_sums() * tf.square(weight_factor)

        ctx = PrepareContext(
            hyperparameters=hyperparameters,
            step=step,
            counters=scalars.step_counters[1:],
            weight_square_sums=decayed_square_sums,
        )
        average_rate = None
        if self._average is not None:
            average_rate = self._average.rate(step)
            # The step that is traced here updates it.
            self._average.follows_weights = True
        return Prepared(
            unscale=1.0 / scalars.loss_scale,
            scaled_decay=scaled_decay,
            weight_factor=weight_factor,
            average_rate=average_rate,
            terms=self._optimizer.prepare(ctx),
        )

    def _decide(
        self, square_sums: tf.Tensor, prepared: Prepared, scalars: StepScalars
    ) -> tuple[Outcome, GradientScaling]:
        """Decides from the gradients' square sums whether the step is taken, and what follows.

        The gradients are means over ranks, so all ranks decide the same.
        """
        hyperparameters = StepHyperparameters.from_vector(scalars.hyperparameters)
        total = _sum_in_lane_zero(square_sums)
        is_finite = tf.math.is_finite(total)
        taken = tf.cast(is_finite, tf.int64)
        in_last_phase = tf.cast(hyperparameters.phase > 0.5, tf.int64)
        scaling = self._loss_scale.next(is_finite, scalars.loss_scale, *scalars.loss_scale_counters)
        updates, *phase_counters = scalars.step_counters
        norm_lanes = tf.sqrt(total) * prepared.unscale
        lanes = [
            *scaling,
            updates + taken,
            *[counter + taken * in_last_phase for counter in phase_counters],
            norm_lanes,
        ]
        loss_scale, *counters, norm = [_from_lane_zero(lane) for lane in lanes]
        clipped_square_sums = square_sums
        clip_factor = None
        largest_norm = self._optimizer.global_clipnorm
        if largest_norm is not None:
            clip_factor = _from_lane_zero(largest_norm / tf.maximum(norm_lanes, largest_norm))
            clipped_square_sums = square_sums * tf.square(clip_factor)
        gradient_norms = tf.sqrt(clipped_square_sums) * prepared.unscale
        rates = self._optimizer.scale_layers(gradient_norms, prepared.terms, hyperparameters)
        num_scaling_counters = len(scalars.loss_scale_counters)
        outcome = Outcome(
            is_finite=tf.reduce_any(_IS_LANE_ZERO & is_finite),
            loss_scale=loss_scale,
            loss_scale_counters=counters[:num_scaling_counters],
            step_counters=counters[num_scaling_counters:],
            gradient_norm=norm,
            gradient_square_sums=square_sums,
            trust_ratios=rates.trust_ratios,
        )
        return outcome, GradientScaling(clip_factor, rates.learning_rates)

    def _apply_rule(
        self,
        grad: tf.Tensor,
        old: Values,
        ctx: UpdateContext[Any],
        prepared: Prepared,
        clip_factor: tf.Tensor | None,
    ) -> Values:
        """Returns the new weights, slots and averages under the keys of the old ones."""
        if clip_factor is not None:
            grad *= clip_factor
        weight = old[WEIGHTS]
        if prepared.weight_factor is not None:
            weight *= ctx.layers.broadcast(prepared.weight_factor)
        slots_class = self._optimizer.Slots
        slots = slots_class(*[old[slot] for slot in slots_class._fields])
        new_weight, new_slots = self._optimizer.update(grad, weight, slots, ctx)
        new = {WEIGHTS: new_weight, **new_slots._asdict()}
        if prepared.average_rate is not None:
            new[AVERAGE] = old[AVERAGE] - prepared.average_rate * (old[AVERAGE] - new_weight)
        return new


def _update_index(scalars: StepScalars) -> tf.Tensor:
    """Returns the 1-based index of this update, float32; skipped steps do not count."""
    return tf.cast(scalars.step_counters[0], tf.float32) + 1.0


def keep_old_unless(is_finite: tf.Tensor, new: Values, old: Values) -> Values:
    """Returns the new values, or the old ones if the step is skipped, without a branch."""
    return {name: tf.where(is_finite, new[name], value) for name, value in old.items()}


def _sum_in_lane_zero(vector: tf.Tensor) -> tf.Tensor:
    """Returns [_LANES] with the sum of the vector in lane 0 and 0 in the others."""
    return tf.reduce_sum(tf.where(_IS_LANE_ZERO[:, None], vector[None], 0.0), 1)


def _from_lane_zero(lanes: tf.Tensor) -> tf.Tensor:
    """Returns lane 0 as a scalar."""
    return tf.reduce_sum(tf.where(_IS_LANE_ZERO, lanes, tf.zeros_like(lanes)))
