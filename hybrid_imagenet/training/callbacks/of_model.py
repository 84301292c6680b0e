"""Finds the parts that callbacks need in a compiled Keras model."""

from __future__ import annotations

from typing import Any

import keras


def optimizer(model: keras.Model) -> Any:
    """Returns the optimizer that a model was compiled with; None if it was not."""
    found: Any = getattr(model, "optimizer", None)
    return found


def schedule(model: keras.Model) -> Any:
    """Returns the schedule of its optimizer, None without one."""
    return getattr(optimizer(model), "schedule", None)
