"""The parts for Keras models of other programs (docs/library.md); its import registers this
package's classes.
"""

from __future__ import annotations

import os
import pkgutil
from typing import Any

import keras

from hybrid_imagenet.models import normalization as _normalization  # noqa: F401 - and this package's layer
from hybrid_imagenet.optimizers.registry import OPTIMIZERS

for _method in OPTIMIZERS.values():  # and the optimizers, whose modules register them
    pkgutil.resolve_name(_method.constructor)


def load_model(path: str | os.PathLike[str], **arguments: Any) -> keras.Model:
    """Loads a `.keras` file as `keras.models.load_model` does, which does not know this package's
    classes by itself.

    It needs neither Horovod nor other ranks. After `import hybrid_imagenet.library` Keras's own
    function does the same.

    Args:
      path: of the file.
      arguments: of `keras.models.load_model`.

    Returns:
      The model, compiled with its optimizer and that one's state.
    """
    return keras.models.load_model(path, **arguments)
