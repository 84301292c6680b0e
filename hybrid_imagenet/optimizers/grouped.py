"""Base of all optimizers of this package: one update of all variables, with scalars that a schedule
sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.kinds import ParameterKind, check_updatable, classify_by_rank
from hybrid_imagenet.optimizers.layout import pack_each
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.registry import OPTIMIZERS, Options
from hybrid_imagenet.optimizers.rule import Before, Measured, Step
from hybrid_imagenet.optimizers.update import Update
from hybrid_imagenet.options import invalid_reason, options_of

HYPER_NAMES = ("learning_rate", "momentum", "phase", "lower_bound", "upper_bound", "lars_share")


class Hyper:
    """The scalars of a step: one small float32 variable on the CPU, so that setting all of them is
    one assignment.
    """

    def __init__(self, **values: float):
        """Starts from the given values; the others are 0."""
        self.names = HYPER_NAMES
        self._values = np.array([values.get(name, 0.0) for name in self.names], np.float32)
        self._index = {name: i for i, name in enumerate(self.names)}
        with tf.device("CPU:0"):
            self._variable = tf.Variable(self._values, trainable=False, name="hyper")

    def assign(self, values: Mapping[str, float]) -> None:
        """Sets the named scalars; those not named stay.

        Raises:
          KeyError: for a name that is not in `names`.
        """
        changed = False
        for name, value in values.items():
            index, new = self._index[name], np.float32(value)
            if self._values[index] != new:
                self._values[index] = new
                changed = True
        if changed:
            # Variable.assign takes twice as long. Without the device the constant would go to a GPU
            # and come back.
            with tf.device("CPU:0"):
                values = tf.constant(self._values.copy())
                tf.raw_ops.AssignVariableOp(resource=self._variable.handle, value=values)

    def vector(self) -> tf.Tensor:
        """The scalars in the order of `names`, on the CPU; inside a graph they are read at every
        execution.
        """
        with tf.device("CPU:0"):
            return self._variable.read_value()

    def __getitem__(self, name: str) -> float:
        return float(self._values[self._index[name]])


class GroupedOptimizer(keras.optimizers.Optimizer):
    """Base of the optimizers: a subclass gives `Options`, `slots` and `rule`, on values.

    The rule runs once a step, for all variables as one vector (`update`). Decay and kinds stay as
    in the first step.

    All state is float32. Gradients belong to the whole batch, already averaged over ranks. Weight
    decay is coupled L2 (`g += weight_decay * w`) unless it is decoupled (`decay_share`), and spares
    biases and normalization parameters unless `decay_all` is set (Jia et al.).
    """

    Options: ClassVar[type[Options]] = Options
    """The dataclass of the arguments, see `optimizers.registry`."""
    slots: tuple[str, ...] = ()
    """The kinds of state that `build` creates, one variable per trainable variable; an attribute
    for each.
    """
    scales_layers: bool = False
    """Whether LARS gives each layer a rate of its own."""

    def __init__(self, *values: Any, **options: Any):
        """Takes the fields of `Options`: the learning rate and, where there is one, the momentum
        also by position.

        They are the first values of the scalars; a schedule may replace them at each step.

        Raises:
          ValueError: for a value out of its bounds, or a learning rate that is no number.
        """
        given: Any = self.Options(*values, **options)
        if not isinstance(given.learning_rate, (int, float)):
            raise ValueError(
                f"learning_rate={given.learning_rate!r}: give a number, and a schedule of "
                "hybrid_imagenet.schedules to DistributedOptimizer(schedule=...)"
            )
        if given.learning_rate < 0:
            raise ValueError(f"learning_rate={given.learning_rate}: must not be negative")
        for known in options_of(self.Options).values():
            value = getattr(given, known.name)
            if reason := invalid_reason(value, known):
                raise ValueError(f"{known.name}={value}: {reason}")
        rate, momentum = float(given.learning_rate), getattr(given, "momentum", 0.0)
        hyper = Hyper(
            learning_rate=rate,
            momentum=momentum,
            lars_share=1.0,
            lower_bound=rate,
            upper_bound=rate,
        )
        constructor = f"{type(self).__module__}:{type(self).__name__}"
        name = given.name or next(
            (name for name, m in OPTIMIZERS.items() if m.constructor == constructor), None
        )
        super().__init__(learning_rate=lambda: hyper["learning_rate"], name=name)
        self.options, self.hyper = given, hyper
        decoupled = getattr(given, "decoupled_decay", False)
        self.decay = 0.0 if decoupled else float(given.weight_decay)
        self.decoupled = float(given.weight_decay) if decoupled else 0.0
        self.kinds: list[ParameterKind] = []
        self._alone: Update | None = None  # of `apply`

    @property
    def learning_rate(self) -> float:
        """The learning rate last set, by the constructor, a schedule or an assignment."""
        return self.hyper["learning_rate"]

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.hyper.assign({"learning_rate": float(value)})

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self.options) | {"name": self.name}

    def set_kinds(self, kinds: Sequence[ParameterKind]) -> None:
        """Sets the kind of each trainable variable, in order; without it, vectors count as biases.

        Raises:
          ValueError: if called after a build with another number of variables.
        """
        if self.built and len(kinds) != len(private_api.trainable_variables(self)):
            raise ValueError(
                f"{len(kinds)} kinds for {len(private_api.trainable_variables(self))} variables"
            )
        self.kinds = list(kinds)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state: for each of `slots` one float32 variable per trainable variable.

        Raises:
          UserError: for weights that are not float32, that quantization to float8 has added, or
            whose kind is not known.
        """
        if self.built:
            return
        variables = list(variables)
        check_updatable(variables)
        other = next((v for v in variables if v.dtype != "float32"), None)
        if other is not None:
            raise UserError(
                f"The optimizer {self.name} updates float32 weights only, but {other.path} is"
                f" {other.dtype}. Use the dtype policy mixed_{other.dtype}, which keeps float32"
                " weights, or an optimizer of Keras."
            )
        if not self.kinds:
            self.set_kinds(classify_by_rank(variables))
        if len(self.kinds) != len(variables):
            raise ValueError(f"{len(self.kinds)} kinds for {len(variables)} variables")
        for slot in self.slots:
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
        """Updates the variables from unscaled gradients, one per variable; a step that is not
        finite changes nothing.

        Raises:
          ValueError: if a gradient is missing, or the variables are not those that the optimizer
            was built on.
        """
        if trainable_variables is not None:
            self.build(trainable_variables)
            check_known(private_api.trainable_variables(self), trainable_variables)
        elif not self.built:
            raise ValueError("give the variables in the first call, or call build")
        variables = private_api.trainable_variables(self)
        missing = [v.path for g, v in zip(grads, variables, strict=True) if g is None]
        if missing:
            raise ValueError(f"no gradient for {', '.join(missing)}")
        if self._alone is None:
            with tf.init_scope():
                self._alone = Update(self, LossScale())
        self._alone.apply(pack_each([tf.cast(tf.convert_to_tensor(g), tf.float32) for g in grads]))

    def before(self, now: Before) -> dict[str, Any]:
        """Computes once per step what `rule` needs and gradients do not change, by name: scalars,
        or vectors [n].
        """
        return {}

    def layers(self, now: Measured) -> dict[str, tf.Tensor]:
        """Computes once per step what `rule` needs and the sizes of the gradients change: vectors
        [n] or scalars.

        Under `rule.TRUST_RATIOS` it may give the ratios for the log (`trust_ratios`).
        """
        return {}

    def rule(
        self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step
    ) -> dict[str, tf.Tensor]:
        """New values from old ones, elementwise but for what `step` offers; no variable is read or
        assigned.

        Args:
          grad: float32, still multiplied by the loss scale.
          values: `rule.WEIGHTS` and `slots`, in the shape of `grad`.
          step: all else.

        Returns:
          New values under the same keys.
        """
        raise NotImplementedError

    def counters(self) -> list[keras.Variable]:
        """int64 scalars that count the steps in which `hyper["phase"]` is 1."""
        return []

    def decayed_indices(self) -> list[int]:
        """The variables that weight decay acts on."""
        return [
            i
            for i, kind in enumerate(self.kinds)
            if self.options.decay_all or kind is ParameterKind.KERNEL
        ]

    def decay_share(self, hyper: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """The part of `decoupled`, which belongs to the peak rate, that this step takes off the
        weights (SGDW: Loshchilov and Hutter, arXiv 1711.05101, algorithm 1): decay follows the
        schedule, and no momentum.
        """
        peak = self.options.learning_rate
        return self.decays(hyper) * hyper["learning_rate"] / peak if peak else tf.constant(0.0)

    def decays(self, hyper: Mapping[str, tf.Tensor]) -> Any:
        """1 in steps in which weights decay, else 0."""
        return 1.0

    def kernel_indices(self) -> list[int]:
        """The variables that LARS scales: neither biases nor normalization parameters."""
        return [i for i, kind in enumerate(self.kinds) if kind is ParameterKind.KERNEL]


def check_known(built_on: Sequence[keras.Variable], variables: Sequence[keras.Variable]) -> None:
    """Raises ValueError if variables are not those that an optimizer was built on, in their
    order.
    """
    if list(map(id, variables)) != list(map(id, built_on)):
        raise ValueError(
            "these are not the variables that the optimizer was built on, in their order: after a"
            " change of `trainable`, compile the model with a new optimizer"
        )
