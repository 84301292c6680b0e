"""Answers arguments of other libraries' distributed optimizers with what they are called here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hybrid_imagenet.comm.settings import COMPRESSIONS
from hybrid_imagenet.errors import UserError, did_you_mean

_OF_INNER = (
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
    "initial_scale": "Use loss_scale, which is dynamic or a number",
    "dynamic_growth_steps": "Use loss_scale, which is dynamic or a number",
    "loss_scale_factor": "Use loss_scale, which is dynamic or a number",
    "dynamic": "Use loss_scale, which is dynamic or a number",
    "inner_optimizer": "Pass the optimizer as the first argument",
    "optimizer": "Pass the optimizer as the first argument",
    "engine": (
        "Set HYBRID_IMAGENET_ENGINE, or use hybrid-imagenet run --engine, because hi.init()"
        " needs it"
    ),
}


def check_names(names: Iterable[str], known: Sequence[str]) -> None:
    """Raises UserError, with what to use instead, for an argument that is not known."""
    for name in names:
        if name in known:
            continue
        if name in _OF_INNER:
            remedy = (
                "Pass it to the optimizer inside, such as"
                f" DistributedOptimizer(keras.optimizers.SGD({name}=...))"
            )
        else:
            remedy = _REMEDIES.get(name, f"Omit it. Its arguments are {', '.join(known)}")
        near = "" if name in _OF_INNER or name in _REMEDIES else did_you_mean(name, known)
        raise UserError(f"DistributedOptimizer has no argument {name}{near}. {remedy}.")


def check_compression(value: Any) -> None:
    """Raises UserError for a compression that is not a word, such as Horovod's classes."""
    if not isinstance(value, str):
        raise UserError(
            f"compression={value!r} is not supported. Use one of"
            f" {', '.join(map(repr, COMPRESSIONS))}."
        )
