"""Reduces scaled gradients over ranks, checks once that they are finite, and updates the
variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api, xla
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.executor import UpdateExecutor
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.kinds import check_updatable
from hybrid_imagenet.optimizers.layout import Layout, Packed
from hybrid_imagenet.optimizers.loss_scale import LossScale

UPDATE_SCOPE = "optimizer_update"  # a profile shows the update's operations under it


class GradientReducer(Protocol):
    """Reduces gradients: the part of a communicator that the optimizer uses.

    A communicator of several ranks hands the call on to `comm.gradients.GradientReducer`.
    """

    def reduce_gradients(
        self, grads: Sequence[tf.Tensor], names: Sequence[str]
    ) -> tuple[list[tf.Tensor], list[tuple[int, ...]]]:
        """Means over ranks, as vectors in the type that travelled, and the positions of the
        gradients in each.
        """


class DistributedOptimizer(keras.optimizers.LossScaleOptimizer):
    """Averages gradients over ranks, then lets an inner optimizer update the variables once.

    It is a `LossScaleOptimizer`, and Keras must take it for one: `compile` wraps every other
    optimizer of a mixed_float16 model into its own, which would scale the loss a second time and
    call `apply` in a branch that each rank takes or not by its own gradients. Of that class it has
    the name only; what it does is written here.

    In the graph, for gradients g_i of a loss that was multiplied by the loss scale S:

        r_i    = sum over ranks of wire(g_i / N)            one reduction per bucket, as gradients
        appear finite = isfinite(sum_i ||r_i||^2)                  after the reduction: the same
        verdict on every rank
        if finite: the inner optimizer's rule on r / S      float32; on a GPU a mask, not a branch
        (`update`) S      = next(S, finite)

    The division by N comes before the sum, so that a sum over ranks in FP16 overflows only where
    the mean does (Lu et al. §2.2.2-3). A skipped step changes no variable but the loss scale and
    its counters.

    A training step calls `reduce`, then `update_if_finite`. It also works as the optimizer of
    `keras.Model.compile`: `scale_loss` and `apply` follow Keras's protocol, and `apply` does both.

    The inner optimizer is one of this package, or any of Keras's, whose `apply` then gets r / S.
    """

    def __init__(
        self,
        inner: GroupedOptimizer | keras.optimizers.Optimizer,
        communicator: GradientReducer,
        loss_scale: LossScale | None = None,
        *,
        average: WeightAverage | None = None,
        packed: bool | None = None,
        name: str | None = None,
    ):
        """Wraps `inner`.

        Args:
          inner: updates the variables.
          communicator: reduces gradients.
          loss_scale: without it the loss is not scaled.
          average: takes in the weights after every update of this package's optimizers.
          packed: update all variables as one vector (`update`); by default where there is a GPU.
          name: of the optimizer; by default a new one for each.
        """
        super().__init__(inner, name=name)
        self.inner: Any = inner
        self._grouped = isinstance(inner, GroupedOptimizer)
        self.loss_scale = loss_scale or LossScale()
        self._communicator = communicator
        self.grad_norm = keras.Variable(0.0, dtype="float32", trainable=False, name="grad_norm")
        self.average = average
        self._executor: UpdateExecutor | None = None
        if self._grouped:
            self._executor = self.inner.make_executor(self.loss_scale, average, packed=packed)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if not self.built:
            check_updatable(variables)
            self.inner.build(list(variables))
            if self.average is not None:
                self.average.build(variables)
            # Of the last step's gradients, not part of the state: tells which layers were not
            # finite.
            self.square_sums = tf.Variable(
                tf.zeros([len(variables)]), trainable=False, name="square_sums"
            )
            keras.optimizers.Optimizer.build(self, list(variables))

    @property
    def variables(self) -> list[keras.Variable]:
        """State to save: the inner optimizer's, the loss scale's, and what the records say of the
        last step.
        """
        ratios = [self.inner.trust_ratios] if self._grouped else []
        return [*self.inner.variables, *self.loss_scale.variables, self.grad_norm, *ratios]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the state, inner optimizer's included, from the `variables` of another one, or from
        their values.

        Raises:
          ValueError: before `build`, or if the state belongs to another kind of optimizer or model.
        """
        if not self.built:
            raise ValueError(
                "set_weights needs the state that it replaces: call build(trainable_variables)"
                " before it"
            )
        shapes = [tuple(v.shape) for v in self.variables]
        given = [tuple(weight.shape) for weight in weights]
        if given != shapes:
            raise ValueError(
                f"set_weights got {len(given)} values that do not fit the {len(shapes)} variables"
                " of this optimizer: pass the variables of an optimizer of the same kind, built on"
                " the same model"
            )
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    @property
    def iterations(self) -> keras.Variable:
        """Updates applied so far; skipped steps do not count."""
        return self.inner.iterations

    @property
    def learning_rate(self) -> Any:
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss to differentiate, float32."""
        return self.loss_scale.multiply(loss)

    def apply(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Reduces gradients of the scaled loss over ranks and updates the variables, or skips the
        step.

        Args:
          grads: this rank's gradients, one per trainable variable, in any floating type.
          trainable_variables: the variables, needed at the first call only.

        Raises:
          ValueError: if a gradient is missing.
        """
        if trainable_variables is not None:
            self.build(trainable_variables)
        self.update_if_finite(self.reduce(grads))

    def reduce(self, grads: Sequence[tf.Tensor]) -> Packed:
        """Averages gradients of the scaled loss over ranks, which are as in `apply`, after `build`.

        Returns:
          The means over ranks, still scaled, the same on every rank: the vectors that travelled.
        """
        variables = private_api.trainable_variables(self)
        missing = [v.path for g, v in zip(grads, variables, strict=True) if g is None]
        if missing:
            raise ValueError(f"no gradient for {', '.join(missing)}")
        names = _unique([v.path for v in variables])
        return Packed(*self._communicator.reduce_gradients(list(grads), names))

    def update_if_finite(self, reduced: Packed) -> None:
        """Updates the variables from what `reduce` has returned, or skips the step on all ranks
        alike.
        """
        with tf.name_scope(UPDATE_SCOPE):
            square_sums, norm = (
                self._update_by_keras(reduced)
                if self._executor is None
                else self._executor.apply(reduced)
            )
            self.grad_norm.assign(norm)
            self.square_sums.assign(square_sums)

    def _update_by_keras(self, reduced: Packed) -> tuple[tf.Tensor, tf.Tensor]:
        """Lets an optimizer of Keras update, which has a rule for each variable only; returns what
        `UpdateExecutor.apply` does.

        On a GPU all values are put back if the gradients are not finite: a branch would have the
        host wait for that.
        """
        variables = private_api.trainable_variables(self)
        found = Layout([v.shape for v in variables], [i for m in reduced.members for i in m]).split(
            reduced
        )
        grads = [found.get(i, tf.zeros(v.shape)) for i, v in enumerate(variables)]
        square_sums = tf.stack([2.0 * tf.nn.l2_loss(g) for g in grads])
        total, unscale = tf.reduce_sum(square_sums), 1.0 / self.loss_scale.scale.value
        finite = tf.math.is_finite(total)
        held = [v.value for v in (*variables, *self.inner.variables)]

        def update(*values: tf.Tensor) -> None:
            *gradients, factor = values
            self.inner.apply([g * factor for g in gradients], variables)

        def masked(*values: tf.Tensor) -> None:
            *given, taken = values
            before = [v.read_value() for v in held]
            update(*given)
            for variable, old in zip(held, before, strict=True):
                variable.assign(tf.where(taken, variable, old))

        def branch() -> tf.Tensor:
            update(*grads, unscale)
            return tf.constant(True)

        if xla.has_gpu():
            xla.compile_on_gpu(masked)(*grads, unscale, finite)
        else:
            tf.cond(finite, branch, lambda: tf.constant(False))
        self.loss_scale.update(finite)
        return square_sums, tf.sqrt(total) * unscale

    def told(self) -> dict[str, tf.Variable]:
        """Returns the scalars by which records tell of the last step."""
        scale = self.loss_scale
        return {
            "loss_scale": scale.scale.value,
            "skipped_steps": scale.skipped_steps.value,
            "skipped_in_a_row": scale.skipped_in_a_row.value,
            "grad_norm": self.grad_norm.value,
        }

    def non_finite(self) -> list[str]:
        """The variables whose gradients were not finite in the last step, by path; waits for the
        device.
        """
        finite = np.isfinite(self.square_sums.numpy())
        return [
            v.path
            for v, good in zip(private_api.trainable_variables(self), finite, strict=True)
            if not good
        ]


def _unique(paths: Sequence[str]) -> list[str]:
    """The paths, with a number behind one that an earlier variable has too, as layers of a
    subclassed model may.
    """
    seen: dict[str, int] = {}
    found = []
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
        found.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return found
