"""The part of `DistributedOptimizer` that Keras calls: arguments, state, saving and loading."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import Communicator, process
from hybrid_imagenet.errors import UserError, check_format
from hybrid_imagenet.optimizers.accumulation import GradientAccumulator, MicroBatchCounter
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.executor import UpdateExecutor
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer, check_known, check_not_float8
from hybrid_imagenet.optimizers.keras_executor import KerasExecutor
from hybrid_imagenet.optimizers.kinds import ParameterKind, classify, classify_by_rank
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.precision import AUTO, choose, computes_in_float16
from hybrid_imagenet.schedules import training_schedule

FORMAT = 2
"""Number of the form in which Keras saves a `DistributedOptimizer`.

Increase it whenever the configuration or the saved variables change.
"""

_log = logging.getLogger(__name__)


def _inner_argument(name: str) -> property:
    """Returns a property that reads and sets an argument of the inner optimizer, which uses it."""

    def read(self: KerasProtocol) -> Any:
        return getattr(self.inner, name, None)

    def write(self: KerasProtocol, value: Any) -> None:
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


class KerasProtocol(keras.optimizers.LossScaleOptimizer):
    """Arguments, state, saving and loading of `DistributedOptimizer`, for Keras.

    It subclasses LossScaleOptimizer only so that Keras does not wrap it again: `compile` wraps
    every other optimizer of a mixed_float16 model, which would scale the loss a second time and
    call `apply` in a branch that each rank takes by its own gradients. All behavior is overridden.

    Attributes:
      inner: Optimizer that updates the weights.
      loss_scale: Factor of the loss, with the counters of skipped steps.
      grad_norm: L2 norm of the last step's gradients, averaged over ranks and unscaled.
      square_sums: Square sums of the last step's gradients, one per trainable variable. They show
        the layers that are not finite, and are not saved.
      average: Moving average of the weights; None without one.
      schedule: Function that sets values before each step; None without one.
      schedule_is_applied: True once a callback applies the schedule.
      schedule_values: Values that the schedule set for the last step.
      accumulator: Sums of the gradients of micro-batches.
      micro_batches: Counter of micro-batches; None if the optimizer does not accumulate.
      executor: Runs the rule of the inner optimizer; None before `build`.
      wire_dtype: Name of the dtype in which gradients are sent; None before it is chosen.
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
        inner: keras.optimizers.Optimizer,
        *,
        compression: str,
        loss_scale: str | float | LossScale,
        communication: Mapping[str, Any],
        schedule: training_schedule.Schedule | None,
        accumulation_steps: int | None,
        name: str | None,
        communicator: Communicator | None,
        average: WeightAverage | None,
        packed: bool | None,
    ) -> None:
        """Stores the arguments, which are checked already, and creates the state of the wrapper.

        Args:
          inner: Optimizer that updates the weights.
          compression: Type in which gradients are sent, or "auto".
          loss_scale: "dynamic", "auto", a number, or the object to use.
          communication: Name of the all-reduce, and its options; only saved.
          schedule: Function that sets values before each step; None without one.
          accumulation_steps: Micro-batches per update; None for one batch per update.
          name: Name of the optimizer; None for a new name.
          communicator: Connected ranks; None for those of `hi.init`.
          average: Moving average of the weights; None without one.
          packed: Whether to update all variables as one vector; None if there is a GPU.
        """
        # The inner optimizer would accumulate a second time.
        inner.gradient_accumulation_steps = None
        super().__init__(inner, name=name)
        self.inner: Any = inner
        # A LossScale that the caller made stays as it is.
        self._chooses_loss_scale = not isinstance(loss_scale, LossScale)
        self.loss_scale = loss_scale if isinstance(loss_scale, LossScale) else LossScale()
        self.grad_norm = keras.Variable(0.0, dtype="float32", trainable=False, name="grad_norm")
        self.average = average
        self.schedule = schedule
        self.schedule_is_applied = False
        self.schedule_values: dict[str, float] = {}
        self.accumulator = GradientAccumulator()
        self.micro_batches: MicroBatchCounter | None = None
        if accumulation_steps is not None:
            self.micro_batches = MicroBatchCounter(accumulation_steps)
        self.executor: UpdateExecutor | KerasExecutor | None = None
        self.wire_dtype: str | None = None
        self._arguments = {"compression": compression, "loss_scale": loss_scale, **communication}
        self._communicator = communicator
        self._packed = packed
        # Keras variables by id of the tf.Variable with which they share their value.
        self._keras_variables: dict[int, keras.Variable] = {}
        self._model: weakref.ref[keras.Model] | None = None
        self._kinds: dict[int, ParameterKind] = {}  # by id of the variable
        if communicator is None and isinstance(inner, GroupedOptimizer) and schedule is not None:
            # The program passes the peak to the optimizer itself.
            inner.set_scheduled_peak(getattr(schedule, "peak", None))

    # Building

    def attach(self, model: keras.Model) -> None:
        """Remembers the model, and finds the kinds of its trainable variables by their layers.

        `build` looks again, because the first step of a model may make more variables.
        """
        self._model = weakref.ref(model)
        if self.wire_dtype is not None:
            # `load_model` builds the optimizer before it knows the model.
            self.choose_precision()
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
                self.executor = self.inner.make_executor(
                    self.loss_scale, self.average, packed=self._packed
                )
            else:
                self.executor = KerasExecutor(self.inner, self.loss_scale, variables)
            if self.average is not None:
                self.average.build(variables)
            self.square_sums = tf.Variable(
                tf.zeros([len(variables)]), trainable=False, name="square_sums"
            )
            keras.optimizers.Optimizer.build(self, list(variables))
            if self.micro_batches is not None:
                self.accumulator.build(variables)
            if self.wire_dtype is None:
                self.choose_precision()

    def build_for(self, variables: Sequence[Any] | None) -> None:
        """Builds the state for the variables of the first step; checks those of later steps.

        Args:
          variables: Trainable variables, of Keras or TensorFlow; None for those of `build`.

        Raises:
          UserError: If there are no variables, and the optimizer is not built.
          ValueError: If these are not the variables of `build`.
        """
        if variables is not None:
            keras_variables = self._as_keras_variables(variables)
            self.build(keras_variables)
            check_known(private_api.trainable_variables(self), keras_variables)
        elif not self.built:
            raise UserError(
                "optimizer.apply got no variables at its first call. Pass them, or call"
                " hybrid_imagenet.broadcast_model(model) before."
            )

    def _as_keras_variables(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Returns the variables, with a Keras variable for each tf.Variable of a custom loop."""
        for variable in variables:
            if isinstance(variable, tf.Variable) and id(variable) not in self._keras_variables:
                with tf.init_scope():
                    shared = private_api.wrap_tf_variable(variable)
                    self._keras_variables[id(variable)] = shared
        return [self._keras_variables.get(id(variable), variable) for variable in variables]

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

    def choose_precision(self) -> None:
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
        self.wire_dtype = precision.wire_dtype
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

    @property
    def sends_float32_by_default(self) -> bool:
        """Whether gradients are sent in FP32 because no other type was asked for."""
        return self._arguments["compression"] == AUTO and self.wire_dtype == "float32"

    @property
    def updates_tf_variables(self) -> bool:
        """Whether it updates variables of TensorFlow, which belong to no model of Keras."""
        return bool(self._keras_variables)

    # State

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
        if self.micro_batches is None:
            return []
        # Only `build` creates the sums.
        return [self.micro_batches.count, *self.accumulator.sums]

    def _own_variables(self) -> list[keras.Variable]:
        """Returns the state without the inner optimizer's, which Keras saves by itself."""
        return [*self.loss_scale.variables, self.grad_norm, *self._accumulation_variables()]

    @property
    def iterations(self) -> keras.Variable:
        """Updates applied so far; skipped steps do not count."""
        return self.inner.iterations

    @property
    def accumulation_steps(self) -> int | None:
        """Number of micro-batches per update; None if the optimizer does not accumulate."""
        return self.micro_batches.steps if self.micro_batches is not None else None

    @property
    def learning_rate(self) -> Any:
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all state from the `variables` of another optimizer, or from their values.

        Raises:
          ValueError: Before `build`, or if the state belongs to a different kind of optimizer or
            model.
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

    # Methods that Keras or a user calls

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

    # Saving and loading

    def save_own_variables(self, store: Any) -> None:
        """Saves the state without the inner optimizer's, which Keras saves by itself."""
        store["format"] = np.array(FORMAT)
        for i, variable in enumerate(self._own_variables()):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` has saved.

        Raises:
          ValueError: If it was saved with a different number of micro-batches.
        """
        # Keras does the same for an optimizer that is not built: the sums are not known yet.
        if self.micro_batches is not None and not self.built:
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
    ) -> Self:
        """Makes the optimizer again; it connects to no rank before its first step.

        Raises:
          UserError: If another version has saved it.
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
