"""Checks the arguments of `DistributedOptimizer`.

Arguments of other libraries' distributed optimizers get an error that names what to use instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.comm.settings import ALGORITHMS, WIRE_DTYPES, CommunicationSettings
from hybrid_imagenet.errors import SharedError, UserError, did_you_mean
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.precision import AUTO

_ARGUMENTS = (
    "compression",
    "allreduce",
    "loss_scale",
    "schedule",
    "gradient_accumulation_steps",
    "name",
    "fusion_threshold_mb",
)

# Arguments of the optimizer that is passed as the first argument.
_INNER_ARGUMENTS = (
    "learning_rate",
    "momentum",
    "nesterov",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "beta_1",
    "beta_2",
    "epsilon",
    "rho",
    "amsgrad",
)
_REMEDIES = {
    "backward_passes_per_step": (
        "Use gradient_accumulation_steps, which averages the gradients instead of adding them"
    ),
    "average_aggregated_gradients": "Omit it: gradient_accumulation_steps always averages",
    "op": "Omit it: gradients are always averaged over ranks",
    "gradient_predivide_factor": (
        "Omit it: gradients are divided by the number of ranks before the sum"
    ),
    "groups": "Omit it: gradients are packed into buckets of fusion_threshold_mb",
    "num_groups": "Omit it: gradients are packed into buckets of fusion_threshold_mb",
    "sparse_as_dense": "Omit it: sparse gradients are always sent as dense ones",
    "device_dense": "Omit it: gradients are reduced on the device that computes them",
    "device_sparse": "Omit it: gradients are reduced on the device that computes them",
    "process_set": "Omit it: gradients are averaged over all ranks",
    "scale_local_gradients": "Omit it: gradients of all variables are averaged over all ranks",
    "use_locking": "Omit it: updates of variables are not locked",
    "initial_scale": "Use loss_scale, which is auto, dynamic or a number",
    "dynamic_growth_steps": "Use loss_scale, which is auto, dynamic or a number",
    "loss_scale_factor": "Use loss_scale, which is auto, dynamic or a number",
    "dynamic": "Use loss_scale, which is auto, dynamic or a number",
    "engine": "Set the environment variable HYBRID_IMAGENET_ENGINE, because hi.init() needs it",
}


def check_names(names: Iterable[str], valid_names: Sequence[str]) -> None:
    """Raises UserError, with what to use instead, for an argument that is not known."""
    for name in names:
        if name in valid_names:
            continue
        suggestion = ""
        if name in _INNER_ARGUMENTS:
            remedy = (
                "Pass it to the optimizer inside, such as"
                f" DistributedOptimizer(keras.optimizers.SGD({name}=...))"
            )
        elif name in _REMEDIES:
            remedy = _REMEDIES[name]
        else:
            suggestion = did_you_mean(name, valid_names)
            remedy = f"Omit it. Its arguments are {', '.join(valid_names)}"
        raise UserError(f"DistributedOptimizer has no argument {name}{suggestion}. {remedy}.")


def check_compression(value: Any) -> None:
    """Raises UserError for a value that does not exist, such as one of Horovod's classes."""
    compressions = (AUTO, *WIRE_DTYPES)
    if not isinstance(value, str) or value not in compressions:
        raise UserError(
            f"compression={value!r} is not supported. Use one of"
            f" {', '.join(map(repr, compressions))}."
        )


def communication_settings(allreduce: str, options: Mapping[str, Any]) -> CommunicationSettings:
    """Returns how gradients are exchanged.

    Args:
      allreduce: Name of the algorithm.
      options: `fusion_threshold_mb`, and options of the algorithm.

    Raises:
      UserError: For an argument or a value that does not exist.
    """
    algorithm_options = set()
    for algorithm in ALGORITHMS.values():
        algorithm_options |= {field.name for field in dataclasses.fields(algorithm.options)}
    check_names(options, [*_ARGUMENTS, *sorted(algorithm_options)])
    options = dict(options)
    fields = {}
    if "fusion_threshold_mb" in options:
        fields["fusion_threshold_mb"] = options.pop("fusion_threshold_mb")
    try:
        settings = CommunicationSettings(
            allreduce=allreduce,
            deterministic=private_api.is_op_determinism_enabled(),
            **fields,
        )
        return settings.with_options(options)
    except ValueError as error:
        raise UserError(str(error)) from None


def inner_optimizer(inner: Any) -> keras.optimizers.Optimizer:
    """Returns the inner optimizer, which is passed as such or by its name in Keras.

    Raises:
      UserError: If it cannot be wrapped.
      ValueError: For a name that is not an optimizer of Keras.
    """
    if isinstance(inner, str):
        inner = keras.optimizers.get(inner)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise UserError(
            f"inner={inner!r} is not an optimizer. Pass an optimizer of Keras or of"
            " hybrid_imagenet.optimizers."
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise UserError(
            f"inner={inner.name} scales the loss, which DistributedOptimizer does itself. Pass the"
            " optimizer inside it."
        )
    if inner.loss_scale_factor is not None:
        raise UserError(
            f"The inner optimizer has loss_scale_factor={inner.loss_scale_factor:g}, but the loss"
            " must be scaled once. Use DistributedOptimizer(loss_scale=...) instead."
        )
    if inner.built:
        raise UserError(f"inner={inner.name} has been used already. Pass a new optimizer.")
    return inner


def check_average(average: WeightAverage | None, inner: keras.optimizers.Optimizer) -> None:
    """Raises SharedError for an average of the weights of an optimizer of Keras."""
    if average is not None and not isinstance(inner, GroupedOptimizer):
        raise SharedError(
            f"average= is for the optimizers of this package, and {type(inner).__name__} is one"
            " of Keras. Pass use_ema=True to that optimizer, and"
            " keras.callbacks.SwapEMAWeights() to fit."
        )


def check_schedule(schedule: Any) -> None:
    """Raises UserError for a schedule of Keras."""
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        raise UserError(
            "schedule is a schedule of Keras, which counts steps. Use one of"
            " hybrid_imagenet.schedules, which count epochs."
        )


def accumulation_steps(steps: int | None, inner: keras.optimizers.Optimizer) -> int | None:
    """Returns the number of micro-batches per update, or None for one batch per update.

    Args:
      steps: Argument of `DistributedOptimizer`; None for that of the inner optimizer.
      inner: Inner optimizer, which may have an argument of this name.

    Raises:
      UserError: For a number that is not at least 2.
    """
    steps = steps or inner.gradient_accumulation_steps
    if steps is not None and (not isinstance(steps, int) or steps < 2):
        raise UserError(
            f"gradient_accumulation_steps={steps} is not supported. Use a whole number of at least"
            " 2, or omit it."
        )
    return steps


def check_loss_scale(value: Any) -> None:
    """Raises UserError for a word that does not exist, or a number that is not positive."""
    if value in (AUTO, "dynamic") or isinstance(value, LossScale):
        return
    with contextlib.suppress(TypeError, ValueError):
        if 0 < float(value) < math.inf:
            return
    raise UserError(
        f"loss_scale={value} is not supported. Use 'auto', 'dynamic' or a positive number."
    )
