"""Loads TensorFlow and Keras without packages that Keras imports where they are installed, and training never uses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

NOT_NEEDED = ("matplotlib", "pandas", "sklearn")
"""For galleries of images, data frames in `fit`, and Keras models as estimators; they bring SciPy and PyArrow along."""


@contextlib.contextmanager
def without_extras() -> Iterator[None]:
    """Lets the packages of `NOT_NEEDED` look as if they were not installed; afterwards they can be imported again."""
    absent = [name for name in NOT_NEEDED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in absent:
            if sys.modules.get(name, sys) is None:
                del sys.modules[name]
