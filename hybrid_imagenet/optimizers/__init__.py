"""Keras optimizers that update all variables of a model together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_imagenet.optimizers.base import GroupedOptimizer

NAMES = ("hybrid", "adabound", "sgd", "lars")


def create(optimizer: str, **arguments: Any) -> GroupedOptimizer:
    """Builds the optimizer of that name (`NAMES`) with the arguments of its class.

    Raises:
      ValueError: for an unknown name or a value that the class refuses.
    """
    from hybrid_imagenet.optimizers.adabound import AdaBound
    from hybrid_imagenet.optimizers.hybrid import Hybrid
    from hybrid_imagenet.optimizers.lars import LARS
    from hybrid_imagenet.optimizers.sgd import SGD

    classes: dict[str, type[GroupedOptimizer]] = {"hybrid": Hybrid, "adabound": AdaBound, "sgd": SGD, "lars": LARS}
    if optimizer not in classes:
        raise ValueError(f"optimizer={optimizer}: choose one of {', '.join(NAMES)}")
    return classes[optimizer](**arguments)
