"""The optimizer that averages gradients over ranks, for the program, `fit` and custom loops.

`DistributedOptimizer` shows a step from top to bottom: `scale_loss`, `apply`, `reduce` and
`update_if_finite`. The rest of Keras's protocol for optimizers is in `keras_protocol`.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import Communicator, process
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers import arguments
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.first_step_check import check_ranks_agree
from hybrid_imagenet.optimizers.grouped import paths_without_gradient, require_gradients
from hybrid_imagenet.optimizers.keras_protocol import KerasProtocol
from hybrid_imagenet.optimizers.layout import Packed
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.loss_scaling_origin import LossScalingOrigin
from hybrid_imagenet.optimizers.precision import AUTO
from hybrid_imagenet.optimizers.reducer import GradientReducer
from hybrid_imagenet.schedules import training_schedule

UPDATE_SCOPE = "optimizer_update"
"""The name under which a profile shows the operations of an update."""

_log = logging.getLogger(__name__)


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class DistributedOptimizer(KerasProtocol):
    """Averages gradients over ranks and lets an optimizer update the weights.

    It works in `model.compile` and in custom training loops. Pass the same arguments on every rank.
    docs/keras-compatibility.md lists what works with it.

    Gradients are sent in the type in which the model computes them. A model that computes in FP16
    (`mixed_float16`) sends FP16 and has a dynamic loss scale, because small gradients become 0 in
    FP16. All other models send FP32, without a loss scale, which gives the result of one process.
    On a slow network, `compression="fp16"` halves the bytes and adds a loss scale (`LossScale`).
    Wherever there is a scale, custom training loops differentiate `scale_loss(loss)`.

    A step whose mean gradient is not finite is skipped on all ranks. In the graph, where g_ik is
    the gradient of variable i on rank k of N, for a loss that was multiplied by the loss scale S,
    and cast converts to the type of `compression`:

        r_i    = sum_k cast(g_ik / N)                 one all-reduce per bucket, as gradients appear
        finite = isfinite(sum_i ||r_i||^2)            after the sum: the same decision on every rank
        if finite: inner's rule on r / S              float32; on a GPU a mask instead of a branch
        S      = next(S, finite)

    The division by N comes before the sum, so that a sum over ranks in FP16 overflows only if the
    mean does (Lu et al. §2.2.2-3; Micikevicius et al., Mixed Precision Training). A skipped step
    changes neither weights nor slots; the loss scale and its counters follow, the sums of
    accumulation are reset, and `grad_norm` is not finite.

    Example:
      optimizer = hi.DistributedOptimizer(keras.optimizers.AdamW(1e-3))
      model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    Args:
      inner: The optimizer: one of `hybrid_imagenet.optimizers` or of `keras.optimizers`, new and
        without a loss scale; or the name of one of Keras's.
      compression: Type in which gradients are sent: "fp16", "bf16", "none" (FP32), or "auto", which
        is "fp16" for a model that computes in FP16 and "none" for others (default: "auto").
      allreduce: Algorithm that sums gradients: "ring", "torus", "hierarchical", "masters" or
        "size_switched" (docs/communication.md) (default: "ring").
      loss_scale: "dynamic", a positive number, of which 1 does not scale, or "auto", which is
        "dynamic" if gradients are computed or sent in FP16, and 1 for others (default: "auto").
      schedule: Sets learning rate and other values before each step, through a callback of
        `hi.callbacks.default_callbacks()`. One of `hi.schedules`, or a function
        `(start, end, global_batch) -> {"learning_rate": ...}` of fractional epochs (default: None,
        the values of the inner optimizer).
      gradient_accumulation_steps: Micro-batches per update, 2 or more. Their gradients are averaged
        on each rank and reduced once (default: None, the argument of this name of the inner
        optimizer, which it then no longer uses).
      name: Name of the optimizer (default: None, a new name).
      communicator: Ranks that are connected already, with their own `compression` and `allreduce`
        (default: None, the ranks of `hi.init`, which are connected at the first step).
      average: Moving average of the weights, for optimizers of this package (default: None, no
        average).
      packed: Whether to update all variables as one vector, for optimizers of this package
        (default: None, if there is a GPU).
      **communication: `fusion_threshold_mb`, size in MiB at which a bucket of gradients is sent,
        16 by default; and options of the algorithm: `torus_grid`, such as "2x4", and
        `size_switch_kb`, in KiB.

    Raises:
      UserError: For an argument or a value that does not exist, settings other than an earlier
        optimizer's, or an inner optimizer that scales the loss itself or has been used already.
      ValueError: For a name that is not an optimizer of Keras.

    Reference:
      Lu et al. §2.2; Micikevicius et al., arXiv 1710.03740, for the loss scale.
    """

    def __init__(
        self,
        inner: Any,
        *,
        compression: str = AUTO,
        allreduce: str = "ring",
        loss_scale: str | float | LossScale = AUTO,
        schedule: training_schedule.Schedule | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        communicator: Communicator | None = None,
        average: WeightAverage | None = None,
        packed: bool | None = None,
        **communication: Any,
    ):
        arguments.check_compression(compression)
        arguments.check_loss_scale(loss_scale)
        settings = arguments.communication_settings(allreduce, communication)
        inner = arguments.inner_optimizer(inner)
        arguments.check_average(average, inner)
        arguments.check_schedule(schedule)
        super().__init__(
            inner,
            compression=compression,
            loss_scale=loss_scale,
            communication={"allreduce": allreduce, **communication},
            schedule=schedule,
            accumulation_steps=arguments.accumulation_steps(gradient_accumulation_steps, inner),
            name=name,
            communicator=communicator,
            average=average,
            packed=packed,
        )
        self.settings = settings
        self._reducer: GradientReducer | None = None
        self._scaling_origin = LossScalingOrigin()
        # Receives the gradients inside `defer_update`; None outside it.
        self._deferred: types.SimpleNamespace | None = None
        # The program passes its own communicator, and compares the ranks itself.
        self._ranks_were_compared = communicator is not None
        self._warned_of_sparse_gradients = False
        if communicator is None and process.is_initialized():
            process.set_default_settings(settings)

    # A step, from top to bottom. AutoGraph converts what a tf.function of the user calls. It does
    # not know super(), and there is nothing to convert here.

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss to differentiate, float32; `apply` takes the gradients of this one.

        If several optimizers use one loss, scale it by each of them, because each has its own
        scale.

        Raises:
          UserError: On several ranks, for a loss of several values. A tape would add them, so the
            update would depend on how many of them each rank has.
        """
        loss = tf.convert_to_tensor(loss)
        _check_is_one_value(loss)
        self._scaling_origin.scaled()
        if self.wire_dtype is None and not tf.inside_function():
            # A graph reads the scale when it runs, which is after `build`.
            self.choose_precision()
        return self.loss_scale.multiply(tf.cast(loss, tf.float32))

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Averages gradients over ranks and updates the variables, or skips the step on all ranks.

        Args:
          grads: This rank's gradients of `scale_loss(loss)`, one per trainable variable, in any
            floating type; sparse ones are made dense. Without a loss scale they may be those of the
            loss itself.
          trainable_variables: The variables, needed at the first call only.

        Raises:
          ValueError: If a variable has no gradient, or the variables are not those of the first
            call.
          UserError: If it has no variables, there is a loss scale but the loss was not scaled, the
            ranks differ at the start, or XLA compiles this.
        """
        self.build_for(trainable_variables)
        _check_all_exist(grads, private_api.trainable_variables(self))
        self._scaling_origin.check(self.loss_scale)
        gradients = self._dense(grads)
        if self._deferred is not None:
            self._deferred.gradients = gradients
            return
        if private_api.is_compiled_by_xla():
            raise UserError(
                "XLA compiles this training step, and the reduction over ranks cannot be part of"
                " that. Pass callbacks=hybrid_imagenet.callbacks.default_callbacks() to fit, which"
                " keeps it outside. For train_on_batch and loops without fit, use"
                " compile(jit_compile=False)."
            )
        self.accumulate_or_update(gradients)

    @tf.autograph.experimental.do_not_convert
    def accumulate_or_update(self, grads: Sequence[tf.Tensor]) -> None:
        """Adds to the sums of accumulation, or averages over ranks and updates.

        Args:
          grads: Gradients of the scaled loss, one per trainable variable.
        """
        self._check_first_step()
        if self.micro_batches is None:
            self.update_if_finite(self.reduce(grads))
            return
        steps = self.micro_batches.steps

        def add() -> None:
            self.accumulator.add(grads)

        def update() -> None:
            self.update_if_finite(self.reduce(self.accumulator.mean(grads, steps)))
            # Without gradients, as in `MicroBatchCounter.choose`, the sums must be kept.
            with tf.control_dependencies(list(grads)):
                self.accumulator.reset()

        self.micro_batches.choose(grads, add, update)

    def reduce(self, grads: Sequence[tf.Tensor]) -> Packed:
        """Averages gradients of the scaled loss over ranks, after `build`.

        Each gradient is divided by the number of ranks in FP32 and cast to the type in which it is
        sent. Then the gradients of a bucket are summed over ranks by one all-reduce, which begins
        as soon as backpropagation has computed them.

        Returns:
          The means over ranks, still scaled, the same on every rank, in the buckets that were sent.
        """
        variables = private_api.trainable_variables(self)
        require_gradients(grads, variables)
        return self.reducer.reduce(grads, _unique_names([v.path for v in variables]))

    def update_if_finite(self, reduced: Packed) -> None:
        """Updates the variables from what `reduce` returned, or skips the step on all ranks.

        The step is skipped if the sum of the squares of all gradients is not finite. All ranks have
        the same gradients, so they decide the same. The executor divides the gradients by the loss
        scale and calls the rule of the inner optimizer. It also sets the next loss scale.
        """
        with tf.name_scope(UPDATE_SCOPE):
            assert self.executor is not None, "build comes first"
            square_sums, norm = self.executor.apply(reduced)
            self.grad_norm.assign(norm)
            self.square_sums.assign(square_sums)

    # Before and around a step

    @contextlib.contextmanager
    def defer_update(self) -> Iterator[types.SimpleNamespace]:
        """Makes `apply` only store its gradients, as the attribute `gradients` of the result.

        XLA can compile this part of a step. Pass the gradients to `accumulate_or_update` after the
        compiled program.
        """
        # Not a list, because Keras would track it as state.
        self._deferred = types.SimpleNamespace()
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def connect(self) -> None:
        """Connects the ranks and makes the reducer, outside the first step.

        The reducer has a variable, and a variable that is made while a step is traced makes
        TensorFlow trace the step again. Every rank calls it.
        """
        _ = self.reducer

    @property
    def reducer(self) -> GradientReducer:
        """Averages the gradients over ranks, which are connected when it is first used.

        An optimizer that was loaded from a file may never need them.
        """
        wire_dtype = self.wire_dtype or "float32"
        if self._reducer is None:
            with tf.init_scope():  # the first step may be traced now
                if self._communicator is None:
                    # The optimizer may have been made before `hi.init()`.
                    process.set_default_settings(self.settings)
                communicator = self._communicator or process.communicator()
                self._reducer = GradientReducer(communicator, wire_dtype)
        # The type may be chosen again, once the model is known.
        self._reducer.wire_dtype = wire_dtype
        return self._reducer

    def _check_first_step(self) -> None:
        """Compares the ranks, and warns of a schedule without its callback, at the first step."""
        if not self._ranks_were_compared:
            self._ranks_were_compared = True
            with tf.init_scope():
                check_ranks_agree(self, process.communicator())
        if self.schedule is not None and not self.schedule_is_applied:
            self.schedule_is_applied = True  # warn once
            _log.warning(
                "%s: its schedule does nothing without default_callbacks() in fit", self.name
            )

    def _dense(self, grads: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the gradients with sparse ones made dense; warns once about these."""
        variables = private_api.trainable_variables(self)
        pairs = zip(grads, variables, strict=True)
        sparse = [variable.path for grad, variable in pairs if isinstance(grad, tf.IndexedSlices)]
        if sparse and not self._warned_of_sparse_gradients:
            self._warned_of_sparse_gradients = True
            if process.rank() == 0:
                _log.warning("sparse gradients are sent as dense ones: %s", ", ".join(sparse))
        # The shape of a gradient may be unknown although the variable's is known, as after
        # `keras.ops.shape`.
        dense = []
        for grad, variable in zip(grads, variables, strict=True):
            dense.append(tf.ensure_shape(tf.convert_to_tensor(grad), variable.shape))
        return dense

    def average_sums(self, communicator: Communicator) -> None:
        """Replaces the sums of an unfinished accumulation by their mean over ranks.

        Then the sums that one rank saves are right for all ranks. The next update stays the same,
        because it takes the mean over ranks anyway. Every rank calls it. Nothing is changed if the
        ranks have counted different numbers of micro-batches, because then one of them has restored
        its state.
        """
        if self.micro_batches is None:
            return
        counts = communicator.allgather_object(self.micro_batches.read())
        if len(set(counts)) == 1 and counts[0] % self.micro_batches.steps:
            self.accumulator.average_over_ranks(communicator)

    # Reports

    def telemetry_variables(self) -> dict[str, tf.Variable]:
        """Returns the variables on the device that the log reads after a step, by name."""
        return {
            "loss_scale": self.loss_scale.scale.value,
            "skipped_steps": self.loss_scale.skipped_steps.value,
            "skipped_in_a_row": self.loss_scale.skipped_in_a_row.value,
            "grad_norm": self.grad_norm.value,
        }

    def non_finite_variables(self) -> list[str]:
        """Returns the paths of variables whose last gradients were not finite; waits for a GPU."""
        is_finite = np.isfinite(self.square_sums.numpy())
        variables = private_api.trainable_variables(self)
        return [v.path for v, finite in zip(variables, is_finite, strict=True) if not finite]


def _check_is_one_value(loss: tf.Tensor) -> None:
    """Raises UserError on several ranks for a loss of several values."""
    has_several_values = loss.shape.rank and loss.shape.num_elements() != 1
    if has_several_values and process.is_initialized() and process.size() > 1:
        raise UserError(
            f"The loss has the shape {loss.shape}, not one value. Its gradient would be the sum"
            " over the rank's examples, and the update would change with the number of ranks."
            ' Use the mean: tf.reduce_mean(loss), or reduction="sum_over_batch_size" of a loss'
            " of Keras."
        )


def _check_all_exist(grads: Sequence[Any], variables: Sequence[keras.Variable]) -> None:
    """Raises ValueError, with the likely cause, if a variable has no gradient."""
    missing = paths_without_gradient(grads, variables)
    if len(missing) == len(grads):
        raise ValueError(
            "No variable has a gradient. Compute the loss inside the GradientTape, and"
            " optimizer.scale_loss(loss) too if you call it."
        )
    if missing:
        raise ValueError(
            f"There is no gradient for {', '.join(missing)}, because the loss does not use it."
            " Set trainable=False on its layer."
        )


def _unique_names(paths: Sequence[str]) -> list[str]:
    """Returns the paths, with a number after a path that an earlier variable has too.

    Layers of a subclassed model may share a path.
    """
    count: dict[str, int] = {}
    names = []
    for path in paths:
        count[path] = count.get(path, 0) + 1
        names.append(path if count[path] == 1 else f"{path}#{count[path]}")
    return names
