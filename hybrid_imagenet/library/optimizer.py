"""The optimizer for `model.compile`: reduction over ranks, loss scale and accumulation around any
inner optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import CommunicationSettings, Communicator, process
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.errors import SharedError, UserError
from hybrid_imagenet.library import arguments
from hybrid_imagenet.library.same_order import check_same_order
from hybrid_imagenet.optimizers import distributed
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer, check_known
from hybrid_imagenet.optimizers.kinds import ParameterKind, classify, classify_by_rank
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.schedules import training_schedule
from hybrid_imagenet.training.epoch_values import checksum

_BROADCAST = (
    "give fit callbacks=hybrid_imagenet.callbacks.default_callbacks(), or call"
    " hybrid_imagenet.broadcast_model(model), once the model has all its weights; give callbacks"
    " that change the learning rate to every rank"
)

_ARGUMENTS = (
    "compression",
    "allreduce",
    "loss_scale",
    "schedule",
    "gradient_accumulation_steps",
    "name",
    "fusion_threshold_mb",
)

_log = logging.getLogger(__name__)


class _Ranks:
    """The ranks of this process, connected when a gradient first travels: a loaded optimizer may
    never need them.
    """

    def reduce_gradients(
        self, grads: Sequence[tf.Tensor], names: Sequence[str]
    ) -> tuple[list[tf.Tensor], list[tuple[int, ...]]]:
        return process.communicator().reduce_gradients(grads, names)


def _argument_of_inner(name: str) -> property:
    """Returns a property that reads and sets an argument of the inner optimizer, which is the one
    that uses it.
    """

    def read(self: DistributedOptimizer) -> Any:
        return getattr(self.inner, name, None)

    def write(self: DistributedOptimizer, value: Any) -> None:
        inner = vars(self).get("inner")
        if (
            inner is not None
        ):  # the constructor of Keras's base class sets a value before there is an inner optimizer
            setattr(inner, name, value)

    return property(read, write)


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class DistributedOptimizer(distributed.DistributedOptimizer):
    """Averages gradients over ranks and lets `inner` update the weights: for `model.compile` and
    custom loops.

    The loss is scaled under any dtype policy: gradients are sent in FP16 by default, in which small
    ones underflow. A step whose mean gradient is not finite is skipped on all ranks. See
    `optimizers.distributed` for the formulas (Lu et al. 2.2.2; Micikevicius et al., Mixed Precision
    Training), docs/library.md for what works with it.
    """

    # Not `use_ema`: the base class would keep a second average if the wrapper had it too.
    clipnorm = _argument_of_inner("clipnorm")
    global_clipnorm = _argument_of_inner("global_clipnorm")
    clipvalue = _argument_of_inner("clipvalue")
    weight_decay = _argument_of_inner("weight_decay")
    ema_momentum = _argument_of_inner("ema_momentum")
    ema_overwrite_frequency = _argument_of_inner("ema_overwrite_frequency")

    def __init__(
        self,
        inner: Any = None,
        *,
        compression: str = "fp16",
        allreduce: str = "ring",
        loss_scale: str | float = "dynamic",
        schedule: training_schedule.Schedule | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        **communication: Any,
    ):
        """Wraps an optimizer; the same on every rank.

        Args:
          inner: required; one of `hybrid_imagenet.optimizers`, or any of Keras's, as an object or
          by name.
          compression: type in which gradients are sent; none, fp16 or bf16.
          allreduce: ring, torus, hierarchical, masters or size_switched (docs/communication.md).
          loss_scale: `dynamic`, which starts at 2^15, or a number; 1 for none.
          schedule: sets the inner optimizer's scalars before each step, through a callback of
            `default_callbacks()`: `(start, end, global_batch) -> {"learning_rate": ...}` in
            fractional epochs, see `schedules`.
          gradient_accumulation_steps: micro-batches per update, 2 or more; their gradients are
            averaged on each rank and reduced once. By default the inner optimizer's own argument of
            this name, which it then no longer uses.
          name: of the optimizer; by default a new one for each.
          communication: `fusion_threshold_mb`, and options of the all-reduce (`torus_grid`,
            `size_switch_kb`).

        Raises:
          UserError: for a value that does not exist, settings other than an earlier optimizer's, or
            an inner optimizer that scales the loss itself or has been used already.
          ValueError: for a name that is no optimizer of Keras.
        """
        settings = _settings(compression, allreduce, communication)
        if isinstance(inner, str):
            inner = keras.optimizers.get(inner)
        _check_inner(inner)
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            raise UserError(
                "schedule: give one of hybrid_imagenet.schedules in place of one of Keras, which"
                " counts steps"
            )
        steps = gradient_accumulation_steps or inner.gradient_accumulation_steps
        if steps is not None and (not isinstance(steps, int) or steps < 2):
            raise UserError(
                f"gradient_accumulation_steps={steps}: give a whole number of at least 2, or"
                " omit it"
            )
        inner.gradient_accumulation_steps = None
        super().__init__(inner, _Ranks(), _loss_scale(loss_scale), name=name)
        self.schedule = schedule
        self.scheduled = False  # by the callback that sets its values
        self.settings = settings
        self._steps = steps
        self._arguments = {
            "compression": compression,
            "allreduce": allreduce,
            "loss_scale": loss_scale,
            **communication,
        }
        self._held: types.SimpleNamespace | None = None
        self._scaled = self._compared = self._told_sparse = False
        if steps is not None:
            self._micro_batches = keras.Variable(
                0, dtype="int64", trainable=False, name="micro_batches"
            )
        self._totals: list[keras.Variable] = []
        # Variables of Keras by id of the tf.Variable with which they share their value, and so
        # keep.
        self._shared: dict[int, keras.Variable] = {}
        self._model: weakref.ref[keras.Model] | None = None
        self._kinds: dict[int, ParameterKind] = {}  # by id of the variable
        if process.is_initialized():
            process.set_default_settings(settings)

    def attach(self, model: keras.Model) -> None:
        """Learns the kinds of a model's trainable variables from their layers, for when the
        optimizer is built.
        """
        if isinstance(self.inner, GroupedOptimizer) and not self.inner.kinds:
            self._model = weakref.ref(model)  # its first step may make more variables
            self._kinds |= {
                id(v): kind
                for v, kind in zip(model.trainable_variables, classify(model), strict=True)
            }

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state: the inner optimizer's and, for accumulation, float32 sums as large as
        the weights.
        """
        if self.built:
            return
        variables = self._of_keras(variables)
        with tf.init_scope():  # the first `apply` may be in a graph
            model = self._model() if self._model is not None else None
            if model is not None:
                self.attach(model)
                unknown = [v for v in variables if id(v) not in self._kinds]
                self._kinds |= {
                    id(v): kind for v, kind in zip(unknown, classify_by_rank(unknown), strict=True)
                }
                self.inner.set_kinds([self._kinds[id(v)] for v in variables])
            super().build(variables)
            if self._steps is not None:
                self._totals = [
                    keras.Variable(
                        "zeros",
                        shape=v.shape,
                        dtype="float32",
                        trainable=False,
                        name=f"{v.name}_sum",
                    )
                    for v in variables
                ]

    def _of_keras(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Returns the variables, with a Keras variable instead of each tf.Variable that a custom
        loop has passed.
        """
        for variable in variables:
            if isinstance(variable, tf.Variable) and id(variable) not in self._shared:
                with tf.init_scope():
                    self._shared[id(variable)] = private_api.wrap_tf_variable(variable)
        return [self._shared.get(id(variable), variable) for variable in variables]

    def average_sums(self, ranks: Communicator) -> None:
        """Replaces the sums of an unfinished accumulation by their mean over ranks, so that one
        rank's stand for all.

        The update stays what it was, since it takes the mean of the sums. Every rank calls it.
        Where the ranks have counted different micro-batches, one has restored its state, and
        nothing is changed.
        """
        if self._steps is None:
            return
        counts = ranks.allgather_object(int(self._micro_batches.numpy()))
        if len(set(counts)) == 1 and counts[0] % self._steps:
            for i, total in enumerate(self._totals):
                total.assign(ranks.allreduce_sum(total.value, f"accumulated_{i}") / ranks.size)

    @property
    def variables(self) -> list[keras.Variable]:
        """All state, that of the inner optimizer first."""
        return [*super().variables, *self._accumulation()]

    def _accumulation(self) -> list[keras.Variable]:
        return [self._micro_batches, *self._totals] if self._steps is not None else []

    def _own(self) -> list[keras.Variable]:
        return [*self.loss_scale.variables, self.grad_norm, *self._accumulation()]

    # AutoGraph, which converts what a tf.function of the user calls, knows no super() and has
    # nothing to convert here.
    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss to differentiate, float32; `apply` takes the gradients of this one.

        Raises:
          UserError: on several ranks, for a loss of several values. A tape would add them, so that
            the update would depend on how many of them each rank has.
        """
        loss = tf.convert_to_tensor(loss)
        if (
            loss.shape.rank
            and loss.shape.num_elements() != 1
            and process.is_initialized()
            and process.size() > 1
        ):
            raise UserError(
                f"The loss has the shape {loss.shape}, not one value. Its gradient would be the sum"
                " over the rank's examples, and the update would change with the number of ranks."
                ' Use the mean: tf.reduce_mean(loss), or reduction="sum_over_batch_size" of a loss'
                " of Keras."
            )
        self._scaled = True
        return super().scale_loss(tf.cast(loss, tf.float32))

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Reduces gradients of the scaled loss over ranks and updates the variables, or skips the
        step on all ranks.

        Args:
          grads: this rank's gradients, one per trainable variable, in any floating type; sparse
          ones are made dense.
          trainable_variables: the variables, needed at the first call only.

        Raises:
          ValueError: if a variable has no gradient, or the variables are not those of the first
          call.
          UserError: if it has no variables, the loss was not scaled, ranks differ at the start, or
            XLA compiles this.
        """
        if trainable_variables is not None:
            variables = self._of_keras(trainable_variables)
            self.build(variables)
            check_known(private_api.trainable_variables(self), variables)
        elif not self.built:
            raise UserError(
                "apply needs the variables at its first call, or hybrid_imagenet.broadcast_model"
                " before it"
            )
        if not self._scaled and (
            self.loss_scale.dynamic or float(self._arguments["loss_scale"]) != 1.0
        ):
            raise UserError(
                "the loss was not scaled: differentiate optimizer.scale_loss(loss), or give "
                "DistributedOptimizer(loss_scale=1)"
            )
        self._scaled = False
        dense = self._dense(grads)
        if self._held is not None:
            self._held.gradients = dense
            return
        if private_api.is_compiled_by_xla():
            raise UserError(
                "XLA compiles this training step, and the reduction over ranks cannot be part of"
                " that: give fit callbacks=hybrid_imagenet.callbacks.default_callbacks(), which"
                " keeps it outside; for train_on_batch, and loops without fit,"
                " compile(jit_compile=False)"
            )
        self.take(dense)

    @tf.autograph.experimental.do_not_convert
    def take(self, grads: Sequence[tf.Tensor]) -> None:
        """Accumulates, or reduces and updates; the part of `apply` that XLA cannot compile."""
        self._compare_ranks()
        if self.schedule is not None and not self.scheduled:
            self.scheduled = True  # told once
            _log.warning(
                "%s: its schedule does nothing without default_callbacks() in fit", self.name
            )
        if self._steps is None:
            self.update_if_finite(self.reduce(grads))
        else:
            self._accumulate(grads, self._steps)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[types.SimpleNamespace]:
        """Inside, `apply` leaves its `gradients` in what this yields and does no more; `take` then
        takes them.
        """
        self._held = types.SimpleNamespace()  # of a list Keras would keep track
        try:
            yield self._held
        finally:
            self._held = None

    def _accumulate(self, grads: Sequence[tf.Tensor], steps: int) -> None:
        for total, grad in zip(self._totals, grads, strict=True):
            total.value.assign_add(tf.cast(grad, tf.float32))
        count = self._micro_batches.value.assign_add(1)

        def update() -> tf.Tensor:
            # The counter is the same on all ranks, and so is this branch.
            self.update_if_finite(self.reduce([total.value / steps for total in self._totals]))
            for total in self._totals:
                total.value.assign(tf.zeros_like(total.value))
            return tf.constant(True)

        tf.cond(tf.equal(count % steps, 0), update, lambda: tf.constant(False))

    def _dense(self, grads: Sequence[Any]) -> list[tf.Tensor]:
        missing = [
            v.path
            for g, v in zip(grads, private_api.trainable_variables(self), strict=True)
            if g is None
        ]
        if len(missing) == len(grads):
            raise ValueError(
                "no variable has a gradient: call optimizer.scale_loss(loss) inside of the"
                " GradientTape"
            )
        if missing:
            raise ValueError(
                f"no gradient for {', '.join(missing)}: the loss does not use it; set"
                " trainable=False on its layer"
            )
        sparse = [
            v.path
            for g, v in zip(grads, private_api.trainable_variables(self), strict=True)
            if isinstance(g, tf.IndexedSlices)
        ]
        if sparse and not self._told_sparse:
            self._told_sparse = True
            if process.rank() == 0:
                _log.warning("sparse gradients travel as dense ones: %s", ", ".join(sparse))
        # The shape of a gradient may be unknown where the variable's is known, as behind
        # `keras.ops.shape`.
        variables = private_api.trainable_variables(self)
        return [
            tf.ensure_shape(tf.convert_to_tensor(g), v.shape)
            for g, v in zip(grads, variables, strict=True)
        ]

    def _compare_ranks(self) -> None:
        """Compares weights and state over ranks at the first step, so that a forgotten broadcast is
        noticed there.
        """
        if self._compared:
            return
        self._compared = True
        with tf.init_scope():
            ranks = process.communicator()
            if ranks.size == 1:
                return
            check_same_order(ranks)
            state = [
                v for v in self.variables if v is not private_api.learning_rate_variable(self.inner)
            ]
            own = {
                "weights": digest(private_api.trainable_variables(self)),
                "optimizer state": digest(state),
                "learning rate": np.float32(
                    getattr(self, "learning_rate", 0)
                ),  # MultiOptimizer has none
            }
            check_agreement(ranks, own, "before the first step", _BROADCAST)

    def exclude_from_weight_decay(self, *given: Any, **named: Any) -> None:
        """Leaves variables of the inner optimizer out of its weight decay; see Keras's method of
        this name.
        """
        self.inner.exclude_from_weight_decay(*given, **named)

    def save_own_variables(self, store: Any) -> None:
        """Saves the state without the inner optimizer's, which Keras saves by itself."""
        for i, variable in enumerate(self._own()):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` has saved.

        Raises:
          ValueError: if it was saved with another number of micro-batches, or by another optimizer.
        """
        if (
            self._steps is not None and not self.built
        ):  # as Keras does: what it sums up is not known yet
            _log.warning(
                "%s: its state is not loaded, since it is not built; the weights are", self.name
            )
            return
        own = self._own()
        if len(store.keys()) != len(own):
            raise ValueError(
                f"the saved optimizer has {len(store.keys())} variables, this one {len(own)}: give"
                " it the same gradient_accumulation_steps"
            )
        for i, variable in enumerate(own):
            variable.assign(store[str(i)])

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, and the inner optimizer's scalars of the last step.

        A schedule is kept if `hybrid_imagenet.schedules` made it; a function of one's own is not.
        """
        config: dict[str, Any] = {
            "inner": keras.saving.serialize_keras_object(self.inner),
            "name": self.name,
            "gradient_accumulation_steps": self._steps,
            "schedule": dict(getattr(self.schedule, "arguments", None) or {}) or None,
            **self._arguments,
        }
        if isinstance(self.inner, GroupedOptimizer):
            config["kinds"] = [kind.value for kind in self.inner.kinds]
            config["hyper"] = {
                name: self.inner.hyperparameters[name] for name in self.inner.hyperparameters.names
            }
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> DistributedOptimizer:
        """Makes the optimizer again; it connects to no rank before its first step."""
        config = dict(config)
        kinds, hyper = config.pop("kinds", None), config.pop("hyper", None)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner"), custom_objects=custom_objects
        )
        schedule = config.pop("schedule", None)
        made = cls(
            inner, schedule=training_schedule.create(**schedule) if schedule else None, **config
        )
        if kinds:
            inner.set_kinds([ParameterKind(kind) for kind in kinds])
        if hyper:
            inner.hyperparameters.assign(hyper)
        return made


def digest(variables: Sequence[keras.Variable]) -> str:
    """Returns a checksum of variables' values in 16 hexadecimal digits; waits for the device."""
    return f"{int(checksum(variables)) % 2**64:016x}"


def check_agreement(ranks: Communicator, own: Mapping[str, Any], when: str, remedy: str) -> None:
    """Compares values over ranks; every rank calls it.

    Args:
      ranks: to compare.
      own: this rank's values by name, JSON-ready; the same names on all ranks.
      when: how the message begins.
      remedy: how it ends.

    Raises:
      SharedError: on all ranks, with each name whose values differ, these values and the ranks that
        have them.
    """
    rows = ranks.allgather_object({name: str(value) for name, value in own.items()})
    found = []
    for name in rows[0]:
        holders: dict[str, list[str]] = {}
        for rank, row in enumerate(rows):
            holders.setdefault(row[name], []).append(str(rank))
        if len(holders) > 1:
            values = (f"{value} on rank {', '.join(holding)}" for value, holding in holders.items())
            found.append(f"{name} ({'; '.join(values)})")
    if found:
        raise SharedError(f"{when} the ranks differ in {' and '.join(found)}: {remedy}")


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise UserError(
            f"inner={inner!r}: give an optimizer of Keras or of hybrid_imagenet.optimizers"
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise UserError(
            f"inner={inner.name}: DistributedOptimizer scales the loss itself; give it the"
            " optimizer inside"
        )
    if inner.loss_scale_factor is not None:
        raise UserError(
            f"loss_scale_factor={inner.loss_scale_factor:g}: give"
            " DistributedOptimizer(loss_scale=...) instead: the loss must be scaled once"
        )
    if inner.built:
        raise UserError(f"inner={inner.name}: it has been used already; give a new one")


def _settings(compression: str, allreduce: str, more: Mapping[str, Any]) -> CommunicationSettings:
    arguments.check_compression(compression)
    of_algorithm = {
        field.name
        for algorithm in ALGORITHMS.values()
        for field in dataclasses.fields(algorithm.options)
    }
    arguments.check_names(more, [*_ARGUMENTS, *sorted(of_algorithm)])
    options = dict(more)
    fields = {name: options.pop(name) for name in ("fusion_threshold_mb",) if name in options}
    fields["deterministic"] = private_api.is_op_determinism_enabled()
    try:
        return CommunicationSettings(
            allreduce=allreduce, compression=compression, options=options, **fields
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def _loss_scale(value: str | float) -> LossScale:
    try:
        return LossScale.of(value)
    except ValueError:
        raise UserError(f"loss_scale={value}: give dynamic, or a positive number") from None
