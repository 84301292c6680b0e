"""Loads `.keras` files of models that use classes of this package (docs/library.md).

Importing this module registers these classes with Keras.
"""

from __future__ import annotations

import os
import pkgutil
from typing import Any

import keras

# Each of these modules registers its classes with Keras when it is imported.
from hybrid_imagenet.models import normalization as _normalization  # noqa: F401
from hybrid_imagenet.optimizers import distributed as _distributed  # noqa: F401
from hybrid_imagenet.optimizers.registry import OPTIMIZERS

for _spec in OPTIMIZERS.values():
    pkgutil.resolve_name(_spec.constructor)


def load_model(path: str | os.PathLike[str], **arguments: Any) -> keras.Model:
    """Loads a `.keras` file that contains classes of this package.

    `keras.models.load_model` does not know these classes unless they were imported.
    Loading needs neither Horovod nor other ranks.

    Example:
      model = hi.load_model("model.keras")

    Args:
      path: The file.
      **arguments: Passed to `keras.models.load_model`, such as `compile=False`.

    Returns:
      The model, compiled with its optimizer and the optimizer's state.

    Raises:
      ValueError: If there is no such file.
      UserError: If another version of this package has saved the optimizer.
    """
    return keras.models.load_model(path, **arguments)
