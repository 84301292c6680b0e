"""The optimizer that averages gradients over ranks, for the program, `fit` and custom loops."""

from __future__ import annotations

import contextlib
import enum
import logging
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import Communicator, process
from hybrid_imagenet.comm.agreement import check_agreement, digest
from hybrid_imagenet.errors import SharedError, UserError, check_format
from hybrid_imagenet.optimizers import arguments
from hybrid_imagenet.optimizers.accumulation import GradientAccumulator
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.executor import UpdateExecutor
from hybrid_imagenet.optimizers.grouped import (
    GroupedOptimizer,
    check_known,
    check_not_float8,
    paths_without_gradient,
    require_gradients,
)
from hybrid_imagenet.optimizers.keras_executor import KerasExecutor
from hybrid_imagenet.optimizers.kinds import ParameterKind, classify, classify_by_rank
from hybrid_imagenet.optimizers.layout import Packed
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.precision import AUTO, choose, computes_in_float16
from hybrid_imagenet.optimizers.reducer import GradientReducer
from hybrid_imagenet.order.same_order import check_same_order
from hybrid_imagenet.schedules import training_schedule

FORMAT = 1
"""Number of the form in which Keras saves a `DistributedOptimizer`.

Increase it whenever the configuration or the saved variables change.
"""

UPDATE_SCOPE = "optimizer_update"
"""The name under which a profile shows the operations of an update."""

_BROADCAST_REMEDY = (
    "pass callbacks=hybrid_imagenet.callbacks.default_callbacks() to fit, or call"
    " hybrid_imagenet.broadcast_model(model), once the model has all its weights; pass callbacks"
    " that change the learning rate to fit on every rank"
)
# The weights may also be equal because every rank has read the same file. Then this is true as
# well, because only the broadcast gives each rank its own random numbers.
_NO_BROADCAST = (
    "the weights of all ranks are equal at the first step, but no rank has sent them to the others."
    " If they are equal only because of equal seeds, another order of calls makes them differ, and"
    " layers such as dropout may draw the same numbers on every rank. Call"
    " hybrid_imagenet.broadcast_model(model) on every rank before the first step, or pass"
    " callbacks=hybrid_imagenet.callbacks.default_callbacks() to fit"
)

_log = logging.getLogger(__name__)


class MicroBatchUse(enum.Enum):
    """How the gradients of a micro-batch are used, if they are accumulated."""

    ADD = "add to the sums"
    UPDATE = "update"


def _inner_argument(name: str) -> property:
    """Returns a property that reads and sets an argument of the inner optimizer, which uses it."""

    def read(self: DistributedOptimizer) -> Any:
        return getattr(self.inner, name, None)

    def write(self: DistributedOptimizer, value: Any) -> None:
        # Keras's constructor sets a value before there is an inner optimizer.
        inner = vars(self).get("inner")
        if inner is None:
            return
        is_unused = isinstance(inner, GroupedOptimizer) and name != "global_clipnorm"
        if is_unused and value != getattr(inner, name, None):
            raise UserError(
                f"{name} of {type(inner).__name__} cannot be set afterwards. Pass weight_decay or"
                " global_clipnorm to its constructor."
            )
        setattr(inner, name, value)

    return property(read, write)


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class DistributedOptimizer(keras.optimizers.LossScaleOptimizer):
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
        finite = isfinite(sum_i ||r_i||^2)            after the sum: the same verdict on every rank
        if finite: inner's rule on r / S              float32; on a GPU a mask instead of a branch
        S      = next(S, finite)

    The division by N comes before the sum, so that a sum over ranks in FP16 overflows only if the
    mean does (Lu et al. §2.2.2-3; Micikevicius et al., Mixed Precision Training). A skipped step
    changes neither weights nor slots; the loss scale and its counters follow, the sums of
    accumulation are reset, and `grad_norm` is not finite.

    It subclasses LossScaleOptimizer only so that Keras does not wrap it again: `compile` wraps
    every other optimizer of a mixed_float16 model, which would scale the loss a second time and
    call `apply` in a branch that each rank takes by its own gradients. All behavior is overridden.

    Example:
      optimizer = hi.DistributedOptimizer(keras.optimizers.AdamW(1e-3))
      model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    Args:
      inner: the optimizer, required: one of `hybrid_imagenet.optimizers` or of
        `keras.optimizers`, new and without a loss scale; or the name of one of Keras's
        (default: None, an error).
      compression: type in which gradients are sent: "fp16", "bf16", "none" (FP32), or "auto", which
        is "fp16" for a model that computes in FP16 and "none" for others (default: "auto").
      allreduce: algorithm that sums gradients: "ring", "torus", "hierarchical", "masters" or
        "size_switched" (docs/communication.md) (default: "ring").
      loss_scale: "dynamic", a positive number, of which 1 does not scale, or "auto", which is
        "dynamic" if gradients are computed or sent in FP16, and 1 for others (default: "auto").
      schedule: sets learning rate and other values before each step, through a callback of
        `hi.callbacks.default_callbacks()`. One of `hi.schedules`, or a function
        `(start, end, global_batch) -> {"learning_rate": ...}` of fractional epochs (default: None,
        the values of the inner optimizer).
      gradient_accumulation_steps: micro-batches per update, 2 or more. Their gradients are averaged
        on each rank and reduced once (default: None, the argument of this name of the inner
        optimizer, which it then no longer uses).
      name: name of the optimizer (default: None, a new name).
      communicator: ranks that are connected already, with their own `compression` and `allreduce`
        (default: None, the ranks of `hi.init`, which are connected at the first step).
      average: moving average of the weights, for optimizers of this package (default: None, no
        average).
      packed: whether to update all variables as one vector, for optimizers of this package
        (default: None, if there is a GPU).
      **communication: `fusion_threshold_mb`, size in MiB at which a bucket of gradients is sent,
        16 by default; and options of the algorithm: `torus_grid`, such as "2x4", and
        `size_switch_kb`, in KiB.

    Raises:
      UserError: for an argument or a value that does not exist, settings other than an earlier
        optimizer's, or an inner optimizer that scales the loss itself or has been used already.
      ValueError: for a name that is not an optimizer of Keras.

    Reference:
      Lu et al. §2.2; Micikevicius et al., arXiv 1710.03740, for the loss scale.
    """

    # `use_ema` is not here: the base class would keep a second average if the wrapper had it too.
    clipnorm = _inner_argument("clipnorm")
    global_clipnorm = _inner_argument("global_clipnorm")
    clipvalue = _inner_argument("clipvalue")
    weight_decay = _inner_argument("weight_decay")
    ema_momentum = _inner_argument("ema_momentum")
    ema_overwrite_frequency = _inner_argument("ema_overwrite_frequency")

    def __init__(
        self,
        inner: Any = None,
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
        if isinstance(inner, str):
            inner = keras.optimizers.get(inner)
        arguments.check_inner(inner)
        if average is not None and not isinstance(inner, GroupedOptimizer):
            raise SharedError(
                f"average= is for the optimizers of this package, and {type(inner).__name__} is one"
                " of Keras. Pass use_ema=True to that optimizer, and"
                " keras.callbacks.SwapEMAWeights() to fit."
            )
        arguments.check_schedule(schedule)
        accumulation_steps = gradient_accumulation_steps or inner.gradient_accumulation_steps
        arguments.check_accumulation(accumulation_steps)
        inner.gradient_accumulation_steps = None
        super().__init__(inner, name=name)
        self.inner: Any = inner
        self.loss_scale = loss_scale if isinstance(loss_scale, LossScale) else LossScale()
        self.grad_norm = keras.Variable(0.0, dtype="float32", trainable=False, name="grad_norm")
        self.average = average
        self.schedule = schedule
        if communicator is None and isinstance(inner, GroupedOptimizer) and schedule is not None:
            # The program passes the peak to the optimizer itself.
            inner.set_scheduled_peak(getattr(schedule, "peak", None))
        # Whether a callback sets the values of the schedule, and those of the last step.
        self.schedule_is_applied = False
        self.schedule_values: dict[str, float] = {}
        self.settings = settings
        self.accumulator = GradientAccumulator()
        self.accumulation_steps = accumulation_steps
        if accumulation_steps is not None:
            self._micro_batches = keras.Variable(
                0, dtype="int64", trainable=False, name="micro_batches"
            )
        # A LossScale that the caller made stays as it is.
        self._chooses_loss_scale = not isinstance(loss_scale, LossScale)
        self._arguments = {
            "compression": compression,
            "allreduce": allreduce,
            "loss_scale": loss_scale,
            **communication,
        }
        # Name of the dtype in which gradients are sent; None before it is chosen.
        self._wire_dtype: str | None = None
        self._communicator = communicator
        self._reducer: GradientReducer | None = None
        self._packed = packed
        self._executor: UpdateExecutor | KerasExecutor | None = None  # made by `build`
        # Whether `scale_loss` was called since the last `apply`, and whether that was in a graph.
        self._loss_was_scaled = False
        self._scaled_in_graph = False
        # Receives the gradients inside `defer_update`; None outside it.
        self._deferred: types.SimpleNamespace | None = None
        # The kind of micro-batch that is traced now, see `traced_for`; None for all kinds.
        self._traced_for: MicroBatchUse | None = None
        # The program passes its own communicator, and compares the ranks itself.
        self._ranks_were_compared = communicator is not None
        self._warned_of_sparse_gradients = False
        # Keras variables by id of the tf.Variable with which they share their value.
        self._keras_variables: dict[int, keras.Variable] = {}
        self._model: weakref.ref[keras.Model] | None = None
        self._kinds: dict[int, ParameterKind] = {}  # by id of the variable
        if communicator is None and process.is_initialized():
            process.set_default_settings(settings)

    # Building and state

    def attach(self, model: keras.Model) -> None:
        """Remembers the model, and finds the kinds of its trainable variables by their layers.

        `build` looks again, because the first step of a model may make more variables.
        """
        self._model = weakref.ref(model)
        if self._wire_dtype is not None:
            # `load_model` builds the optimizer before it knows the model.
            self._choose_precision()
        if isinstance(self.inner, GroupedOptimizer) and not self.inner.kinds:
            kinds = zip(model.trainable_variables, classify(model), strict=True)
            self._kinds |= {id(variable): kind for variable, kind in kinds}

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state: the inner optimizer's and, for accumulation, sums of gradients."""
        if self.built:
            return
        variables = self._as_keras_variables(variables)
        check_not_float8(variables)
        with tf.init_scope():  # the first `apply` may be in a graph
            self._set_kinds(variables)
            self.inner.build(list(variables))
            if isinstance(self.inner, GroupedOptimizer):
                self._executor = self.inner.make_executor(
                    self.loss_scale, self.average, packed=self._packed
                )
            else:
                self._executor = KerasExecutor(self.inner, self.loss_scale, variables)
            if self.average is not None:
                self.average.build(variables)
            # Square sums of the last step's gradients, which show the layers that are not finite.
            # They are not saved.
            self.square_sums = tf.Variable(
                tf.zeros([len(variables)]), trainable=False, name="square_sums"
            )
            keras.optimizers.Optimizer.build(self, list(variables))
            if self.accumulation_steps is not None:
                self.accumulator.build(variables)
            if self._wire_dtype is None:
                self._choose_precision()

    def _choose_precision(self) -> None:
        """Chooses how gradients are sent and scaled, by what is known of the model."""
        model = self._model() if self._model is not None else None
        if model is None:
            is_float16 = keras.config.dtype_policy().compute_dtype == "float16"
        else:
            variables = private_api.trainable_variables(self) if self.built else ()
            is_float16 = computes_in_float16(model, variables)
        precision = choose(
            self._arguments["compression"],
            self._arguments["loss_scale"] if self._chooses_loss_scale else 1,
            computes_in_float16=is_float16,
            num_ranks=self._num_ranks(),
        )
        self._wire_dtype = precision.wire_dtype
        if self._reducer is not None:
            self._reducer.wire_dtype = precision.wire_dtype
        if self._chooses_loss_scale:
            with tf.init_scope():  # the first step may be traced now
                self.loss_scale.configure(
                    precision.initial_scale, dynamic=precision.is_scale_dynamic
                )

    def _num_ranks(self) -> int:
        """Returns the number of ranks; 1 for an optimizer that was made before `hi.init()`."""
        if self._communicator is not None:
            return self._communicator.size
        return process.size() if process.is_initialized() else 1

    def _set_kinds(self, variables: Sequence[keras.Variable]) -> None:
        """Sets the kinds of the variables of the model that was attached, if there is one."""
        model = self._model() if self._model is not None else None
        has_kinds = not isinstance(self.inner, GroupedOptimizer) or self.inner.kinds
        if model is None or has_kinds:
            return
        self.attach(model)
        unknown = [v for v in variables if id(v) not in self._kinds]
        for variable, kind in zip(unknown, classify_by_rank(unknown), strict=True):
            self._kinds[id(variable)] = kind
        self.inner.set_kinds([self._kinds[id(v)] for v in variables])

    def _as_keras_variables(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Returns the variables, with a Keras variable for each tf.Variable of a custom loop."""
        for variable in variables:
            if isinstance(variable, tf.Variable) and id(variable) not in self._keras_variables:
                with tf.init_scope():
                    shared = private_api.wrap_tf_variable(variable)
                    self._keras_variables[id(variable)] = shared
        return [self._keras_variables.get(id(variable), variable) for variable in variables]

    @property
    def variables(self) -> list[keras.Variable]:
        """All state to save, that of the inner optimizer first."""
        has_ratios = isinstance(self.inner, GroupedOptimizer) and self.inner.built
        ratios = [self.inner.trust_ratios] if has_ratios else []
        return [
            *self.inner.variables,
            *self.loss_scale.variables,
            self.grad_norm,
            *ratios,
            *self._accumulation_variables(),
        ]

    def _accumulation_variables(self) -> list[keras.Variable]:
        if self.accumulation_steps is None:
            return []
        if not self.built:
            return [self._micro_batches]
        return [self._micro_batches, *self.accumulator.sums]

    def _own_variables(self) -> list[keras.Variable]:
        """Returns the state without the inner optimizer's, which Keras saves by itself."""
        return [*self.loss_scale.variables, self.grad_norm, *self._accumulation_variables()]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all state from the `variables` of another optimizer, or from their values.

        Raises:
          ValueError: before `build`, or if the state belongs to another kind of optimizer or model.
        """
        if not self.built:
            raise ValueError(
                "set_weights needs the state that it replaces: call build(trainable_variables)"
                " before it"
            )
        shapes = [tuple(v.shape) for v in self.variables]
        new_shapes = [tuple(weight.shape) for weight in weights]
        if new_shapes != shapes:
            raise ValueError(
                f"set_weights got {len(new_shapes)} values that do not fit the {len(shapes)}"
                " variables of this optimizer: pass the variables of an optimizer of the same kind,"
                " built on the same model"
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
        if self._reducer is None:
            with tf.init_scope():  # the first step may be traced now
                if self._communicator is None:
                    # The optimizer may have been made before `hi.init()`.
                    process.set_default_settings(self.settings)
                communicator = self._communicator or process.communicator()
                self._reducer = GradientReducer(communicator, self._wire_dtype or "float32")
        return self._reducer

    # A step

    # AutoGraph converts what a tf.function of the user calls. It does not know super(), and there
    # is nothing to convert here.
    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss to differentiate, float32; `apply` takes the gradients of this one.

        If several optimizers use one loss, scale it by each of them, because each has its own
        scale.

        Raises:
          UserError: on several ranks, for a loss of several values. A tape would add them, so the
            update would depend on how many of them each rank has.
        """
        loss = tf.convert_to_tensor(loss)
        has_several_values = loss.shape.rank and loss.shape.num_elements() != 1
        if has_several_values and process.is_initialized() and process.size() > 1:
            raise UserError(
                f"The loss has the shape {loss.shape}, not one value. Its gradient would be the sum"
                " over the rank's examples, and the update would change with the number of ranks."
                ' Use the mean: tf.reduce_mean(loss), or reduction="sum_over_batch_size" of a loss'
                " of Keras."
            )
        self._loss_was_scaled = True
        self._scaled_in_graph = tf.inside_function()
        if self._wire_dtype is None and not self._scaled_in_graph:
            # A graph reads the scale when it runs, which is after `build`.
            self._choose_precision()
        return self.loss_scale.multiply(tf.cast(loss, tf.float32))

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Averages gradients over ranks and updates the variables, or skips the step on all ranks.

        Args:
          grads: this rank's gradients of `scale_loss(loss)`, one per trainable variable, in any
            floating type; sparse ones are made dense. Without a loss scale they may be those of the
            loss itself.
          trainable_variables: the variables, needed at the first call only.

        Raises:
          ValueError: if a variable has no gradient, or the variables are not those of the first
            call.
          UserError: if it has no variables, there is a loss scale but the loss was not scaled, the
            ranks differ at the start, or XLA compiles this.
        """
        if trainable_variables is not None:
            variables = self._as_keras_variables(trainable_variables)
            self.build(variables)
            check_known(private_api.trainable_variables(self), variables)
        elif not self.built:
            raise UserError(
                "optimizer.apply got no variables at its first call. Pass them, or call"
                " hybrid_imagenet.broadcast_model(model) before."
            )
        self._check_gradients(grads)
        self._check_loss_was_scaled()
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

    @contextlib.contextmanager
    def traced_for(self, micro_batch: MicroBatchUse) -> Iterator[None]:
        """Makes steps that are traced in this context right for one kind of micro-batch only."""
        before = self._traced_for
        self._traced_for = micro_batch
        try:
            yield
        finally:
            self._traced_for = before

    def micro_batches(self) -> int:
        """Returns the number of micro-batches that were accumulated; waits for a GPU."""
        return int(self._micro_batches.numpy())

    @tf.autograph.experimental.do_not_convert
    def accumulate_or_update(self, grads: Sequence[tf.Tensor]) -> None:
        """Adds to the sums of accumulation, or averages over ranks and updates.

        Args:
          grads: gradients of the scaled loss, one per trainable variable.
        """
        self._compare_ranks()
        if self.schedule is not None and not self.schedule_is_applied:
            self.schedule_is_applied = True  # warn once
            _log.warning(
                "%s: its schedule does nothing without default_callbacks() in fit", self.name
            )
        if self.accumulation_steps is None:
            self.update_if_finite(self.reduce(grads))
            return
        steps = self.accumulation_steps
        count = self._micro_batches.value + 1
        self._micro_batches.value.assign(count)

        def update() -> tf.Tensor:
            self.update_if_finite(self.reduce(self.accumulator.mean(grads, steps)))
            self.accumulator.reset()
            return tf.constant(True)

        def add() -> tf.Tensor:
            self.accumulator.add(grads)
            return tf.constant(False)

        if self._traced_for is MicroBatchUse.ADD:
            add()
        elif self._traced_for is MicroBatchUse.UPDATE:
            update()
        else:
            # The counter is the same on all ranks, so all take the same branch. On a GPU the host
            # waits for it at every micro-batch. `fit` and the program choose on the host instead; a
            # custom loop cannot, because one function of the user's serves all micro-batches.
            tf.cond(tf.equal(count % steps, 0), update, add)

    def reduce(self, grads: Sequence[tf.Tensor]) -> Packed:
        """Averages gradients of the scaled loss over ranks, after `build`.

        Returns:
          The means over ranks, still scaled, the same on every rank, in the buckets that were sent.
        """
        variables = private_api.trainable_variables(self)
        require_gradients(grads, variables)
        return self.reducer.reduce(grads, _unique_names([v.path for v in variables]))

    def update_if_finite(self, reduced: Packed) -> None:
        """Updates the variables from what `reduce` returned, or skips the step on all ranks."""
        with tf.name_scope(UPDATE_SCOPE):
            assert self._executor is not None, "build comes first"
            square_sums, norm = self._executor.apply(reduced)
            self.grad_norm.assign(norm)
            self.square_sums.assign(square_sums)

    def _check_loss_was_scaled(self) -> None:
        """Raises UserError if there is a loss scale, but `scale_loss` was not called.

        Other optimizers' scaled losses do not count.
        """
        if not (self._loss_was_scaled or self.loss_scale.is_one):
            raise UserError(
                "optimizer.apply got gradients of a loss that was not scaled, but they are computed"
                " or sent in FP16, in which small ones become 0. Differentiate"
                " optimizer.scale_loss(loss), for each optimizer its own, or use"
                " DistributedOptimizer(loss_scale=1)."
            )
        # If only `scale_loss` is in a graph, its later calls leave no sign here.
        is_hidden = self._scaled_in_graph and not tf.inside_function()
        self._loss_was_scaled = self._loss_was_scaled and is_hidden

    def _check_gradients(self, grads: Sequence[Any]) -> None:
        """Raises ValueError, with the likely cause, if a variable has no gradient."""
        variables = private_api.trainable_variables(self)
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

    # Agreement between ranks

    def average_sums(self, communicator: Communicator) -> None:
        """Replaces the sums of an unfinished accumulation by their mean over ranks.

        Then the sums that one rank saves are right for all ranks. The next update stays the same,
        because it takes the mean over ranks anyway. Every rank calls it. Nothing is changed if the
        ranks have counted different numbers of micro-batches, because then one of them has restored
        its state.
        """
        if self.accumulation_steps is None:
            return
        counts = communicator.allgather_object(int(self._micro_batches.numpy()))
        if len(set(counts)) == 1 and counts[0] % self.accumulation_steps:
            self.accumulator.average_over_ranks(communicator)

    def _compare_ranks(self) -> None:
        """Compares weights and state over ranks at the first step: a broadcast may be missing."""
        if self._ranks_were_compared:
            return
        self._ranks_were_compared = True
        with tf.init_scope():
            communicator = process.communicator()
            if communicator.size == 1:
                return
            check_same_order(communicator)
            learning_rate = private_api.learning_rate_variable(self.inner)
            values = {
                "weights": digest(private_api.trainable_variables(self)),
                "optimizer state": digest([v for v in self.variables if v is not learning_rate]),
                # keras.optimizers.MultiOptimizer has none.
                "learning rate": np.float32(getattr(self, "learning_rate", 0)),
            }
            check_agreement(communicator, values, "before the first step", _BROADCAST_REMEDY)
            # Variables of TensorFlow belong to no model that could be broadcast.
            has_model = not self._keras_variables
            if has_model and not communicator.has_broadcast_model and communicator.rank == 0:
                _log.warning(_NO_BROADCAST)
            sends_float32 = self._arguments["compression"] == AUTO and self._wire_dtype == "float32"
            if sends_float32 and len(set(communicator.hosts)) > 1 and communicator.rank == 0:
                _log.warning('gradients are sent in FP32; compression="fp16" halves them')

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

    # Keras's protocol

    def apply_gradients(self, grads_and_vars: Any) -> keras.Variable:
        """Calls `apply`; returns the number of updates, as optimizers of Keras."""
        super().apply_gradients(grads_and_vars)
        return self.iterations

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Lets the inner optimizer set the final values of the variables."""
        self.inner.finalize_variable_values(var_list)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Excludes variables from the inner optimizer's weight decay; see Keras's method."""
        self.inner.exclude_from_weight_decay(*args, **kwargs)

    def save_own_variables(self, store: Any) -> None:
        """Saves the state without the inner optimizer's, which Keras saves by itself."""
        store["format"] = np.array(FORMAT)
        for i, variable in enumerate(self._own_variables()):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` has saved.

        Raises:
          ValueError: if it was saved with another number of micro-batches.
        """
        # Keras does the same for an optimizer that is not built: the sums are not known yet.
        if self.accumulation_steps is not None and not self.built:
            _log.warning(
                "%s: its state is not loaded, since it is not built; the weights are", self.name
            )
            return
        # Files without an optimizer, or with one of Keras or of an earlier version, still have
        # weights to load.
        if "format" not in store or int(np.asarray(store["format"])) != FORMAT:
            _log.warning(
                "%s: the file has no state of a DistributedOptimizer of this version; the weights"
                " are loaded",
                self.name,
            )
            return
        variables = self._own_variables()
        num_saved = len(store.keys()) - 1
        if num_saved != len(variables):
            raise ValueError(
                f"the saved optimizer has {num_saved} variables, this one"
                f" {len(variables)}: give it the same gradient_accumulation_steps"
            )
        for i, variable in enumerate(variables):
            variable.assign(store[str(i)])
        self.loss_scale.keep_setting()

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, and the inner optimizer's scalars of the last step.

        A schedule is kept if `hybrid_imagenet.schedules` made it; a function of yours is not.
        """
        config: dict[str, Any] = {
            "format": FORMAT,
            "inner": keras.saving.serialize_keras_object(self.inner),
            "name": self.name,
            "gradient_accumulation_steps": self.accumulation_steps,
            "schedule": dict(getattr(self.schedule, "arguments", None) or {}) or None,
            **self._arguments,
        }
        if isinstance(self.inner, GroupedOptimizer):
            hyperparameters = self.inner.hyperparameters
            config["kinds"] = [kind.value for kind in self.inner.kinds]
            config["hyper"] = {name: hyperparameters[name] for name in hyperparameters.names}
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> DistributedOptimizer:
        """Makes the optimizer again; it connects to no rank before its first step.

        Raises:
          UserError: if another version has saved it.
        """
        config = dict(config)
        check_format(
            "The optimizer",
            config.pop("format", None),
            FORMAT,
            "Train again, or load the model without it: load_model(PATH, compile=False)",
        )
        kinds = config.pop("kinds", None)
        hyperparameters = config.pop("hyper", None)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner"), custom_objects=custom_objects
        )
        schedule = config.pop("schedule", None)
        if schedule:
            schedule = training_schedule.create(**schedule)
        optimizer = cls(inner, schedule=schedule, **config)
        if kinds:
            inner.set_kinds([ParameterKind(kind) for kind in kinds])
        if hyperparameters:
            inner.hyperparameters.assign(hyperparameters)
        return optimizer


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
