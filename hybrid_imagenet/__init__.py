"""Large-batch training with hybrid gradient computing: ResNet-50 on ImageNet, or a Keras model of one's own.

`import hybrid_imagenet as hi` imports neither TensorFlow nor Horovod; a name of `__all__` is imported when it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = ("callbacks", "data", "optimizers", "schedules")
__all__ = [
    "DistributedOptimizer",
    "broadcast",
    "callbacks",
    "current",
    "data",
    "init",
    "load_model",
    "local_rank",
    "optimizers",
    "rank",
    "schedules",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        value = getattr(importlib.import_module(f"{__name__}.library"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names too."""
    return sorted({*globals(), *__all__})
