"""The public face for a Keras model of one's own; `hybrid_imagenet` itself shows these names (docs/library.md)."""

from hybrid_imagenet.comm.process import current, init, local_rank, rank, shutdown, size
from hybrid_imagenet.library.loading import load_model
from hybrid_imagenet.library.optimizer import DistributedOptimizer
from hybrid_imagenet.training.callbacks.broadcast import broadcast

__all__ = [
    "DistributedOptimizer",
    "broadcast",
    "current",
    "init",
    "load_model",
    "local_rank",
    "rank",
    "shutdown",
    "size",
]
