"""Keras optimizers that update all variables of a model together.

Wrap one in `hi.DistributedOptimizer`, which averages gradients over ranks. Arguments after `*` are
passed by name.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.optimizers.registry import OPTIMIZERS

if TYPE_CHECKING:
    from hybrid_imagenet.optimizers.grouped import GroupedOptimizer

NAMES = tuple(OPTIMIZERS)
"""Names of the optimizers, as for `create` and the flag --optimizer."""
_CLASSES = {
    method.constructor.rpartition(":")[2]: method.constructor for method in OPTIMIZERS.values()
}
_CLASSES["WeightAverage"] = "hybrid_imagenet.optimizers.average:WeightAverage"
__all__ = [*_CLASSES]


def create(optimizer: str, **arguments: Any) -> GroupedOptimizer:
    """Creates an optimizer by its name.

    Args:
      optimizer: One of `NAMES`.
      **arguments: Arguments of its class.

    Returns:
      The optimizer, for `hi.DistributedOptimizer`.

    Raises:
      ValueError: For an unknown name, or a value that is outside its bounds.
      TypeError: For an argument that the class does not have.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer}: choose one of {', '.join(NAMES)}")
    made: GroupedOptimizer = pkgutil.resolve_name(OPTIMIZERS[optimizer].constructor)(**arguments)
    return made


def __getattr__(name: str) -> Any:
    """Finds the classes by name, such as `optimizers.LARS`; TensorFlow is imported then."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(_CLASSES[name])


def __dir__() -> list[str]:
    """Lists the classes too."""
    return sorted({*globals(), *_CLASSES})
