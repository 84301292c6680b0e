"""Checks Keras's own settings before Keras is imported, because it cannot change them later."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_imagenet.errors import HostError

_REQUIRED = {"backend": "tensorflow", "image_data_format": "channels_last", "floatx": "float32"}


def check_keras_settings(environment: Mapping[str, str]) -> None:
    """Checks KERAS_BACKEND and keras.json, which an earlier program may have left behind.

    A program may still change the data format and floatx itself, with functions of `keras.config`.

    Args:
      environment: Environment variables of this process.

    Raises:
      HostError: If the backend is not TensorFlow, or the file sets another data format or floatx.
    """
    if "keras" in sys.modules:
        backend = sys.modules["keras"].config.backend()
        if backend != "tensorflow":
            raise HostError(
                f"{_requirement('backend')}, but it was imported with {backend}. Set"
                " KERAS_BACKEND=tensorflow."
            )
        return
    file = _keras_directory(environment) / "keras.json"
    settings = _read_settings(file)
    backend_variable = environment.get("KERAS_BACKEND")
    if backend_variable:
        # Keras prefers the variable to the file.
        settings.pop("backend", None)
        if backend_variable != "tensorflow":
            raise HostError(
                f"{_requirement('backend')}, but KERAS_BACKEND is {backend_variable}. Unset it, or"
                " set it to tensorflow."
            )
    for name, required in _REQUIRED.items():
        value = settings.get(name, required)
        if value != required:
            raise HostError(
                f'{_requirement(name)}, but {file} says "{name}": "{value}". Change that line, or'
                " remove the file."
            )


def _requirement(name: str) -> str:
    return f"hybrid_imagenet needs Keras with {name.replace('_', ' ')} {_REQUIRED[name]}"


def _keras_directory(environment: Mapping[str, str]) -> Path:
    """Returns the directory in which Keras looks for keras.json."""
    if "KERAS_HOME" in environment:
        return Path(environment["KERAS_HOME"])
    home = os.path.expanduser("~")  # noqa: PTH111 - pathlib raises RuntimeError without a home directory
    # Keras also uses /tmp if it cannot write to the home directory.
    return Path(home if os.access(home, os.W_OK) else "/tmp") / ".keras"


def _read_settings(file: Path) -> dict[str, Any]:
    """Returns the settings of a file, or {} if Keras ignores the file.

    Raises:
      HostError: If the file is JSON but not an object, with which Keras fails.
    """
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(settings, dict):
        raise HostError(
            f"{file} is not a settings file of Keras, because it does not contain names and"
            " values. Remove it."
        )
    return settings
