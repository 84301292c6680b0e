"""Schedules for `DistributedOptimizer(schedule=...)`; they need no TensorFlow."""

from hybrid_imagenet.numerics.plain_schedules import constant, cosine, exponential, hybrid, polynomial, step
from hybrid_imagenet.numerics.schedules import Schedule, create

__all__ = ["Schedule", "constant", "cosine", "create", "exponential", "hybrid", "polynomial", "step"]
