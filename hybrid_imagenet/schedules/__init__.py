"""Schedules for `DistributedOptimizer(schedule=...)`, which need no TensorFlow."""

from hybrid_imagenet.schedules.for_fit import (
    constant,
    cosine,
    exponential,
    hybrid,
    polynomial,
    step,
)
from hybrid_imagenet.schedules.training_schedule import Schedule, create

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "create",
    "exponential",
    "hybrid",
    "polynomial",
    "step",
]
