"""The base class of this package's optimizers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api, xla
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.context import (
    LayerRates,
    NoSlots,
    PrepareContext,
    UpdateContext,
)
from hybrid_imagenet.optimizers.executor import UpdateExecutor
from hybrid_imagenet.optimizers.hyperparameters import (
    Hyperparameters,
    LearningRate,
    StepHyperparameters,
)
from hybrid_imagenet.optimizers.kinds import ParameterKind, classify_by_rank
from hybrid_imagenet.optimizers.layout import pack_each
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.packed import PackedExecutor
from hybrid_imagenet.optimizers.per_variable import PerVariableExecutor
from hybrid_imagenet.optimizers.registry import OPTIMIZERS, Options
from hybrid_imagenet.options import invalid_reason, options_of


class GroupedOptimizer(keras.optimizers.Optimizer, abc.ABC):
    """Base of the optimizers of this package: a subclass writes `update` and names its `Slots`.

    A new optimizer is a subclass in its own file with its formulas in the docstring, a
    dataclass of its options, and a line in `OPTIMIZERS`, both in `optimizers.registry`. It writes

    * `update`, the rule itself, on values: new weight and slots from gradient, weight and slots;
    * `prepare`, if the rule needs something that gradients do not change;
    * `scale_layers`, if the learning rate of a layer follows from the norm of its gradient.

    None of these reads or assigns a variable. The types in `optimizers.context` list the values
    that each of them can use. An `UpdateExecutor` runs them, for all variables as one vector on
    GPUs, or variable by variable on CPUs. So `update` must be elementwise, except for `ctx.layers`.

    All state is float32. Gradients are means over the whole batch and all ranks. Weight decay is
    coupled L2 decay (g += weight_decay * w), unless `decoupled_decay` is set; it spares biases and
    normalization parameters unless `decay_all` is set (Jia et al.). Weight decay and the kinds of
    parameters are fixed at the first step.

    With `global_clipnorm` a rule gets the gradient that `tf.clip_by_global_norm` returns, and the
    norms of that gradient. Weight decay is not clipped.
    """

    Options: ClassVar[type[Options]] = Options
    """The dataclass of the arguments, see `optimizers.registry`."""
    Slots: ClassVar[Any] = NoSlots
    """The NamedTuple of the state per weight. `build` creates a list of variables for each field,
    as an attribute of this name."""
    scales_layers: bool = False
    """Whether LARS gives each layer its own learning rate."""
    num_phases: int = 1
    """Number of update rules; the hyperparameter `phase` selects between two."""

    def __init__(self, *values: Any, **options: Any):
        """Takes the fields of `Options`.

        The learning rate and, if there is one, the momentum may be positional. They are the first
        values of the hyperparameters; a schedule may replace them at each step.

        Raises:
          ValueError: If a value is out of its bounds or the learning rate is not a number.
        """
        arguments: Any = self.Options(*values, **options)
        _check_arguments(arguments, self.Options)
        learning_rate = float(arguments.learning_rate)
        hyperparameters = Hyperparameters(
            learning_rate=learning_rate,
            momentum=getattr(arguments, "momentum", 0.0),
            trust_ratio_exponent=1.0,
            lower_bound=learning_rate,
            upper_bound=learning_rate,
        )
        super().__init__(
            learning_rate=lambda: hyperparameters["learning_rate"],
            name=arguments.name or _registered_name(type(self)),
            global_clipnorm=arguments.global_clipnorm,
        )
        self.options = arguments
        self.hyperparameters = hyperparameters
        is_decoupled = arguments.decay_is_decoupled
        weight_decay = float(arguments.weight_decay)
        self.coupled_decay_rate = 0.0 if is_decoupled else weight_decay
        self.decoupled_decay_rate = weight_decay if is_decoupled else 0.0
        self.kinds: list[ParameterKind] = []
        self._scheduled_peak: float | None = None
        self._learning_rate_was_passed = bool(values) or "learning_rate" in options
        self._standalone_executor: UpdateExecutor | None = None

    # What a subclass writes

    def prepare(self, ctx: PrepareContext) -> Any:
        """Computes the terms that do not depend on the gradients, before these arrive.

        Returns:
          A NamedTuple of scalars and vectors [n], which later methods get as `terms`; None if the
          rule needs none.
        """
        return None

    def scale_layers(
        self, gradient_norms: tf.Tensor, terms: Any, hyperparameters: StepHyperparameters
    ) -> LayerRates:
        """Computes the learning rate of each layer; by default all have the global one.

        Args:
          gradient_norms: L2 norm |g| of each gradient, float32 [n], unscaled; clipped if it is.
          terms: What `prepare` returned.
          hyperparameters: Scalars that the schedule has set.
        """
        return LayerRates(hyperparameters.learning_rate)

    @abc.abstractmethod
    def update(
        self, grad: tf.Tensor, weight: tf.Tensor, slots: Any, ctx: UpdateContext[Any]
    ) -> tuple[tf.Tensor, Any]:
        """Computes new weights and slots from old ones, elementwise but for `ctx.layers`.

        Args:
          grad: Gradient, float32, still multiplied by the loss scale; `ctx.unscale` is its inverse.
          weight: Weights, float32, in the shape of `grad`.
          slots: State of the weights, a `Slots` of values in the shape of `grad`.
          ctx: Everything else.

        Returns:
          The new weights and the new `Slots`.
        """

    def counters(self) -> list[keras.Variable]:
        """Returns int64 scalars that count the steps in which the hyperparameter `phase` is 1."""
        return []

    def decay_is_on(self, hyperparameters: StepHyperparameters) -> Any:
        """Returns 1 in steps in which weights decay, else 0."""
        return 1.0

    # What all optimizers share

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate last set, by the constructor, a schedule or an assignment."""
        return LearningRate(self)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.check_learning_rate(float(value))
        self.hyperparameters.assign({"learning_rate": float(value)})

    @property
    def argument_of_peak(self) -> str | None:
        """Name of the argument that is relative to the peak of the learning rate, or None."""
        return "decoupled_decay" if self.decoupled_decay_rate else None

    @property
    def peak_learning_rate(self) -> float:
        """The peak of the schedule, or the learning rate of the constructor without such a peak."""
        return self._scheduled_peak or float(self.options.learning_rate)

    def set_scheduled_peak(self, peak: float | None) -> None:
        """Sets the peak of the schedule that sets the learning rate.

        Args:
          peak: None for a schedule that does not have this attribute, such as a function.

        Raises:
          UserError: If the peak is needed, and neither the schedule nor the constructor has it.
        """
        self._scheduled_peak = peak
        if peak is None and self.argument_of_peak and not self._learning_rate_was_passed:
            raise UserError(
                f"{self._problem_of_peak()}, but this schedule has no attribute peak."
                f" {self._remedy_of_peak()}"
            )

    def check_learning_rate(self, value: float) -> None:
        """Checks a learning rate that a callback, a function or a loop of the user sets.

        Raises:
          UserError: If the value shows that the learning rate of the constructor is not the peak,
            and the peak is needed. It is not if the value is larger, or if the constructor has its
            default and another value is set before the first update.
        """
        if not self.argument_of_peak or self._scheduled_peak is not None:
            return
        peak = np.float32(self.options.learning_rate)
        replaces_default = (
            not self._learning_rate_was_passed
            and np.float32(value) != peak
            and int(self.iterations.numpy()) == 0
        )
        if replaces_default or np.float32(value) > peak:
            raise UserError(
                f"The learning rate is set to {value:g}. {self._problem_of_peak()}, for which"
                f" {self.name} takes learning_rate={peak:g} of its constructor."
                f" {self._remedy_of_peak()}"
            )

    def _problem_of_peak(self) -> str:
        return f"{self.argument_of_peak} is relative to the peak of the learning rate"

    def _remedy_of_peak(self) -> str:
        return (
            "Pass the largest learning rate of the training as"
            f" hybrid_imagenet.optimizers.{type(self).__name__}(learning_rate=...)."
        )

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self.options) | {
            "name": self.name,
            "global_clipnorm": self.global_clipnorm,
        }

    def make_executor(
        self,
        loss_scale: LossScale,
        average: WeightAverage | None = None,
        *,
        packed: bool | None = None,
    ) -> UpdateExecutor:
        """Creates the executor: packed on GPUs, per variable on CPUs.

        Args:
          loss_scale: Factor of the gradients.
          average: Moving average of the weights; None without one.
          packed: Whether to update all variables as one vector; None if there is a GPU.
        """
        if packed is None:
            packed = xla.has_gpu()
        executor = PackedExecutor if packed else PerVariableExecutor
        return executor(self, loss_scale, average)

    def set_kinds(self, kinds: Sequence[ParameterKind]) -> None:
        """Sets the kind of each trainable variable, in order; by default vectors are biases.

        Raises:
          ValueError: If it is called after a build with a different number of variables.
        """
        if self.built and len(kinds) != len(private_api.trainable_variables(self)):
            raise ValueError(
                f"{len(kinds)} kinds for {len(private_api.trainable_variables(self))} variables"
            )
        self.kinds = list(kinds)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state: for each slot one float32 variable per trainable variable.

        Raises:
          UserError: For weights that are not float32, or whose kind is not known.
        """
        if self.built:
            return
        check_not_float8(variables)
        for variable in variables:
            if variable.dtype != "float32":
                is_half = variable.dtype in ("float16", "bfloat16")
                policy = f"mixed_{variable.dtype}" if is_half else "float32"
                raise UserError(
                    f"The optimizer {self.name} updates float32 weights only, but {variable.path}"
                    f" is {variable.dtype}. Use the dtype policy {policy}, which has float32"
                    " weights, or an optimizer of Keras."
                )
        if not self.kinds:
            self.set_kinds(classify_by_rank(variables))
        if len(self.kinds) != len(variables):
            raise ValueError(f"{len(self.kinds)} kinds for {len(variables)} variables")
        for slot in self.Slots._fields:
            setattr(self, slot, self.add_optimizer_variables(variables, slot))
        # For the log: the last LARS ratios, in the order of `kernel_indices`.
        self.trust_ratios = keras.Variable(
            np.ones(len(self.kernel_indices()), np.float32), trainable=False, name="trust_ratios"
        )
        super().build(variables)

    def apply(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Updates the variables from unscaled gradients, one per variable, without other ranks.

        A step whose gradients are not finite changes nothing.

        Raises:
          ValueError: If a gradient is missing, or the variables are not those that the optimizer
            was built on.
        """
        if trainable_variables is not None:
            self.build(trainable_variables)
            check_known(private_api.trainable_variables(self), trainable_variables)
        elif not self.built:
            raise ValueError("apply got no variables. Pass them at the first call, or call build.")
        require_gradients(grads, private_api.trainable_variables(self))
        if self._standalone_executor is None:
            with tf.init_scope():
                self._standalone_executor = self.make_executor(LossScale())
        float32 = [tf.cast(tf.convert_to_tensor(grad), tf.float32) for grad in grads]
        self._standalone_executor.apply(pack_each(float32))

    def decayed_indices(self) -> list[int]:
        """Returns the positions of the variables that weight decay acts on.

        These do not include variables that `exclude_from_weight_decay` has excluded.
        """
        indices = self.kernel_indices()
        if self.options.decay_all:
            indices = list(range(len(self.kinds)))
        variables = private_api.trainable_variables(self)
        return [i for i in indices if private_api.is_weight_decayed(self, variables[i])]

    def decay_coefficients(self, coefficient: float) -> np.ndarray:
        """Returns the coefficient for variables that decay and 0 for the others, float32 [n]."""
        coefficients = np.zeros(len(self.kinds), np.float32)
        coefficients[self.decayed_indices()] = coefficient
        return coefficients

    def kernel_indices(self) -> list[int]:
        """Returns the positions of kernels: neither biases nor normalization parameters.

        LARS scales these and no others.
        """
        return [i for i, kind in enumerate(self.kinds) if kind is ParameterKind.KERNEL]

    def decoupled_decay_factor(self, hyperparameters: StepHyperparameters) -> tf.Tensor:
        """Returns the part of `decoupled_decay_rate` that this step takes off the weights.

        Decay follows the learning rate and not the momentum: SGDW (Loshchilov and Hutter, arXiv
        1711.05101, algorithm 1). `decoupled_decay_rate` belongs to the peak of the learning rate.
        """
        peak = self.peak_learning_rate
        if not peak:
            return tf.constant(0.0)
        return self.decay_is_on(hyperparameters) * hyperparameters.learning_rate / peak


def hyperparameters_of(optimizer: Any) -> Hyperparameters | None:
    """Returns the hyperparameters of an optimizer of this package, wrapped or not.

    None for an optimizer of Keras.
    """
    inner = getattr(optimizer, "inner", optimizer)
    return inner.hyperparameters if isinstance(inner, GroupedOptimizer) else None


def check_known(built_on: Sequence[keras.Variable], variables: Sequence[keras.Variable]) -> None:
    """Raises ValueError unless variables are those that an optimizer was built on, in order."""
    if list(map(id, variables)) != list(map(id, built_on)):
        raise ValueError(
            "These are not the variables that the optimizer was built on, in their order. After a"
            " change of `trainable`, compile the model with a new optimizer."
        )


def check_not_float8(variables: Sequence[keras.Variable]) -> None:
    """Raises UserError for variables of float8, which are overwritten instead of updated."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UserError(
                f'{variable.path}: training in float8 (model.quantize("float8")) is not supported.'
                " Use the dtype policy mixed_float16 or mixed_bfloat16."
            )


def paths_without_gradient(grads: Sequence[Any], variables: Sequence[keras.Variable]) -> list[str]:
    """Returns the paths of the variables whose gradient is None."""
    pairs = zip(grads, variables, strict=True)
    return [variable.path for grad, variable in pairs if grad is None]


def require_gradients(grads: Sequence[Any], variables: Sequence[keras.Variable]) -> None:
    """Raises ValueError if a variable has no gradient."""
    missing = paths_without_gradient(grads, variables)
    if missing:
        raise ValueError(f"There is no gradient for {', '.join(missing)}.")


def _check_arguments(arguments: Any, options_class: type[Options]) -> None:
    learning_rate = arguments.learning_rate
    if not isinstance(learning_rate, (int, float)):
        raise ValueError(
            f"learning_rate={learning_rate!r} is not a number. Pass a number, and a schedule of"
            " hybrid_imagenet.schedules to DistributedOptimizer(schedule=...)."
        )
    if learning_rate < 0:
        raise ValueError(f"learning_rate={learning_rate} is negative. Pass a positive number.")
    for declared in options_of(options_class).values():
        value = getattr(arguments, declared.name)
        reason = invalid_reason(value, declared)
        if reason:
            raise ValueError(f"{declared.name}={value}: {reason}")


def _registered_name(optimizer_class: type) -> str | None:
    """Returns the name of a class in `OPTIMIZERS`, or None if it is not there."""
    constructor = f"{optimizer_class.__module__}:{optimizer_class.__name__}"
    for name, spec in OPTIMIZERS.items():
        if spec.constructor == constructor:
            return name
    return None
