"""Schedules of the learning rate for `hi.DistributedOptimizer(schedule=...)`, by fractional epoch.

The six functions for `model.fit` have the learning rate at its peak and the number of epochs as
their first arguments. All begin with a warmup, if you ask for one. They do not import TensorFlow.
The figure shows them for 90 epochs: with `warmup_epochs=5`, and `hybrid` with its default of 10.
"""

from hybrid_imagenet.schedules.for_fit import (
    constant,
    cosine,
    exponential,
    hybrid,
    polynomial,
    step,
)
from hybrid_imagenet.schedules.training_schedule import Schedule

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "exponential",
    "hybrid",
    "polynomial",
    "step",
]
