"""Updates all variables as one vector: few kernels, as suits a GPU.

A GPU needs some microseconds to start a kernel, whatever its work. Variable by variable an update
of a ResNet-50 takes several hundred kernels at the end of every step; over one vector of all
variables it takes about ten.

Variables stay what they are, one for each layer: they are copied into the vector, and slices of the
new vector are assigned to them without a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm.packing import ROW_SIZE
from hybrid_imagenet.optimizers.context import UpdateContext
from hybrid_imagenet.optimizers.executor import (
    WEIGHTS,
    Outcome,
    Prepared,
    StepScalars,
    UpdateExecutor,
    Values,
    keep_old_unless,
)
from hybrid_imagenet.optimizers.hyperparameters import StepHyperparameters
from hybrid_imagenet.optimizers.layout import Layout, Packed


class PackedExecutor(UpdateExecutor):
    """Compiles two programs: one runs while gradients are reduced, the other one after that."""

    def _run(self, layout: Layout, reduced: Packed, scalars: StepScalars) -> Outcome:
        variables = self._variables()
        old = {name: layout.pack([v.value for v in each]) for name, each in variables.items()}
        before_gradients = self._compiled(
            ("before gradients", *layout.order),
            functools.partial(self._before_gradients, layout),
        )
        after_gradients = self._compiled(
            ("after gradients", *layout.order),
            functools.partial(self._after_gradients, layout),
        )
        prepared = before_gradients(old[WEIGHTS], scalars)
        outcome, new, unaligned = after_gradients(list(reduced.buckets), old, prepared, scalars)
        for name in variables:
            for position, value in layout.unpack(new[name], unaligned[name]).items():
                variables[name][position].value.assign(value)
        return outcome

    def _before_gradients(
        self, layout: Layout, weights: tf.Tensor, scalars: StepScalars
    ) -> Prepared:
        """Computes the terms that do not depend on the gradients, while these are reduced."""
        decay = self._decay_of_rows(layout)
        return self._prepare(scalars, lambda: layout.square_sums(weights), decay)

    def _after_gradients(
        self,
        layout: Layout,
        buckets: Sequence[tf.Tensor],
        old: Values,
        prepared: Prepared,
        scalars: StepScalars,
    ) -> tuple[Outcome, Values, Values]:
        """Computes all new values.

        Returns:
          The outcome; the new values as [rows, ROW_SIZE]; and, by the same names, the result of
          `Layout.unaligned_values` for each of them.
        """
        flat = tf.concat([tf.cast(bucket, tf.float32) for bucket in buckets], 0)
        grad = tf.reshape(flat, [layout.rows, ROW_SIZE])
        outcome, scaling = self._decide(layout.square_sums(grad), prepared, scalars)
        ctx = UpdateContext(
            hyperparameters=StepHyperparameters.from_vector(scalars.hyperparameters),
            terms=prepared.terms,
            layer_learning_rates=scaling.layer_learning_rates,
            unscale=prepared.unscale,
            layers=layout,
            decay=None if prepared.scaled_decay is None else self._decay_of_rows(layout),
            scaled_decay=prepared.scaled_decay,
        )
        new = self._apply_rule(grad, old, ctx, prepared, scaling.clip_factor)
        new = keep_old_unless(outcome.is_finite, new, old)
        unaligned = {name: layout.unaligned_values(rows) for name, rows in new.items()}
        # Every extra output costs one kernel, so `scaling` is not among them.
        return outcome, new, unaligned

    def _decay_of_rows(self, layout: Layout) -> np.ndarray:
        """Returns the coefficient of coupled weight decay of each row, float32 [rows, 1]."""
        coefficients = self._optimizer.decay_coefficients(self._optimizer.coupled_decay_rate)
        return layout.broadcast_constant(coefficients)
