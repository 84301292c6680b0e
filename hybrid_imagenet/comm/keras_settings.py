"""Checks Keras's own settings before Keras is imported, because it cannot change them
afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_imagenet.errors import HostError

_NEEDED = {"backend": "tensorflow", "image_data_format": "channels_last", "floatx": "float32"}


def check(environment: Mapping[str, str]) -> None:
    """Checks KERAS_BACKEND and the file keras.json, which an earlier program may have left behind.

    A program may still change the data format and floatx itself, by functions of `keras.config`.

    Raises:
      HostError: for a backend other than TensorFlow, or another data format or floatx in the file.
    """
    if "keras" in sys.modules:
        backend = sys.modules["keras"].config.backend()
        if backend != "tensorflow":
            raise HostError(
                f"{_need('backend')}, but it was imported with {backend}. Set"
                " KERAS_BACKEND=tensorflow."
            )
        return
    file = _directory(environment) / "keras.json"
    settings = _read(file)
    chosen = environment.get("KERAS_BACKEND")
    if chosen:
        settings.pop("backend", None)
        if chosen != "tensorflow":
            raise HostError(
                f"{_need('backend')}, but KERAS_BACKEND is {chosen}. Unset it, or set it to"
                " tensorflow."
            )
    for name, needed in _NEEDED.items():
        found = settings.get(name, needed)
        if found != needed:
            raise HostError(
                f'{_need(name)}, but {file} says "{name}": "{found}". Change that line, or remove'
                " the file."
            )


def _need(name: str) -> str:
    return f"hybrid_imagenet needs Keras with {name.replace('_', ' ')} {_NEEDED[name]}"


def _directory(environment: Mapping[str, str]) -> Path:
    """Returns the directory in which Keras looks for keras.json."""
    if "KERAS_HOME" in environment:
        return Path(environment["KERAS_HOME"])
    home = os.path.expanduser("~")  # noqa: PTH111 - pathlib raises RuntimeError without a home directory
    # Keras falls back to /tmp as well.
    return Path(home if os.access(home, os.W_OK) else "/tmp") / ".keras"


def _read(file: Path) -> dict[str, Any]:
    """Returns the settings of a file; {} where Keras ignores it."""
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(settings, dict):
        raise HostError(f"{file} is not a file of Keras: it holds no names and values. Remove it.")
    return settings
