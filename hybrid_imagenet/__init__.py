"""Distributed training for Keras 3, and large-batch recipes for ResNet-50 on ImageNet.

`import hybrid_imagenet as hi` imports neither TensorFlow nor Horovod; a name of `__all__` is
imported when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hybrid_imagenet import callbacks, data, optimizers, order, schedules
    from hybrid_imagenet.callbacks.broadcast import broadcast_model
    from hybrid_imagenet.callbacks.distributed_evaluation import evaluate
    from hybrid_imagenet.callbacks.merge_batch_norm_statistics import merge_batch_norm_statistics
    from hybrid_imagenet.callbacks.synchronized_batch_norm import synchronize_batch_norm
    from hybrid_imagenet.checkpoints.keras_file import load_model
    from hybrid_imagenet.comm.process import communicator, init, local_rank, rank, shutdown, size
    from hybrid_imagenet.errors import UserError
    from hybrid_imagenet.optimizers.distributed import DistributedOptimizer

# The module of each public name that is not itself a module. `init` sets variables that TensorFlow
# reads when it is imported, so `comm.process` must not import TensorFlow.
_MODULE_BY_NAME = {
    **dict.fromkeys(
        ("communicator", "init", "local_rank", "rank", "shutdown", "size"), "comm.process"
    ),
    "DistributedOptimizer": "optimizers.distributed",
    "UserError": "errors",
    "broadcast_model": "callbacks.broadcast",
    "evaluate": "callbacks.distributed_evaluation",
    "load_model": "checkpoints.keras_file",
    "merge_batch_norm_statistics": "callbacks.merge_batch_norm_statistics",
    "synchronize_batch_norm": "callbacks.synchronized_batch_norm",
}
__all__ = [
    "DistributedOptimizer",
    "UserError",
    "broadcast_model",
    "callbacks",
    "communicator",
    "data",
    "evaluate",
    "init",
    "load_model",
    "local_rank",
    "merge_batch_norm_statistics",
    "optimizers",
    "order",
    "rank",
    "schedules",
    "shutdown",
    "size",
    "synchronize_batch_norm",
]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name in _MODULE_BY_NAME:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)
        globals()[name] = value
        return value
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names of the module, with public names that have not been imported yet."""
    return sorted({*globals(), *__all__})
