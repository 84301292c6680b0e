"""Names the columns in which tables of images keep the images and their labels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hybrid_imagenet.errors import UserError

_IMAGE = ("image", "img", "jpg")
_LABEL = ("label", "labels", "cls", "fine_label")


def choose(place: Path | str, names: Iterable[str]) -> tuple[str, str]:
    """Returns the names of the image and the label column among those that a table at `place` has.

    Raises:
      UserError: if one of the two is missing.
    """
    has = tuple(names)
    image = next((name for name in _IMAGE if name in has), None)
    label = next((name for name in _LABEL if name in has), None)
    if image is None or label is None:
        raise UserError(
            f"{place}: needs an image column ({_either(_IMAGE)}) and a label column ({_either(_LABEL)}), has "
            f"{', '.join(has) or 'none'}"
        )
    return image, label


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
