"""Keras optimizers that update all variables of a model together."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.optimizers.registry import OPTIMIZERS

if TYPE_CHECKING:
    from hybrid_imagenet.optimizers.base import GroupedOptimizer

NAMES = tuple(OPTIMIZERS)


def create(optimizer: str, **arguments: Any) -> GroupedOptimizer:
    """Builds the optimizer of that name (`NAMES`) with the arguments of its class.

    Raises:
      ValueError: for an unknown name or a value that the class refuses.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer}: choose one of {', '.join(NAMES)}")
    made: GroupedOptimizer = pkgutil.resolve_name(OPTIMIZERS[optimizer].constructor)(**arguments)
    return made
