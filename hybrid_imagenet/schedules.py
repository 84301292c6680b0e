"""Schedules for `DistributedOptimizer(schedule=...)`; they need no TensorFlow."""

from hybrid_imagenet.numerics.plain_schedules import after_warmup, hybrid
from hybrid_imagenet.numerics.schedules import Schedule, create

__all__ = ["Schedule", "after_warmup", "create", "hybrid"]
