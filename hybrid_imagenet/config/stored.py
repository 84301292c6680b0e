"""Reads config.json, the settings and the environment with which a run was started."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.config.flags import OPTIONS
from hybrid_imagenet.errors import LOAD_WEIGHTS_WITH_NUMPY, UserError, check_format
from hybrid_imagenet.options import Option, invalid_reason
from hybrid_imagenet.runlog import json_fields
from hybrid_imagenet.runlog.json_fields import (
    COUNT,
    TEXT,
    FieldType,
    is_number,
    is_text,
    list_of,
    object_of,
)

FORMAT = 3
"""Number that config.json has as `format`.

Increase it whenever a flag is removed or gets another meaning, or another key changes.
"""
# 31 December 9999 in seconds since 1970. Later dates cannot be formatted.
_LAST_DATE = 253402300799

_KINDS = {
    "flags": FieldType(
        "an object with the flags of a run",
        lambda value: isinstance(value, dict),
        null=False,
        required=True,
    ),
    "origins": FieldType("an object of texts", object_of(is_text), null=False, required=True),
    "started": FieldType(
        "a time in seconds since 1970", lambda value: is_number(value) and 0 <= value <= _LAST_DATE
    ),
    "world_size": FieldType(
        "a whole number above 0",
        lambda value: json_fields.is_count(value) and value > 0,
        null=False,
    ),
    "hosts": FieldType("a list of texts", list_of(is_text)),
    "train_images": COUNT,
    "validation_images": COUNT,
    "num_classes": COUNT,
    "peak_learning_rate": json_fields.NUMBER,
    "gpu": TEXT,
    "precision": TEXT,
    "version": TEXT,
}
"""Values with which programs calculate. All others are only shown."""


def read(directory: pathlib.Path) -> dict[str, Any]:
    """Reads the config.json of a run.

    Flags that do not exist are not checked.

    Args:
      directory: Directory of the run.

    Raises:
      UserError: If the file cannot be read, another version has saved it, or a value has a wrong
        type or is out of bounds.
    """
    path = directory / "config.json"
    values = files.read_json(path)
    check_format(path, values.get("format"), FORMAT, LOAD_WEIGHTS_WITH_NUMPY)
    json_fields.check_fields(values, _KINDS, str(path))
    for name, value in values["flags"].items():
        if name in OPTIONS and not _is_possible(value, OPTIONS[name]):
            raise UserError(
                f"{path}: the flag {name} is {json_fields.shorten_json(value)}, which is not a"
                " possible value. Restore the file from a copy."
            )
    return values


def _is_possible(value: Any, option: Option) -> bool:
    """Returns whether a value has the type of a flag and is within its bounds."""
    kind = option.kind
    if value is None:
        return kind.optional
    if kind.repeated:
        one = dataclasses.replace(option, kind=dataclasses.replace(kind, repeated=False))
        return isinstance(value, list) and all(_is_possible(item, one) for item in value)
    if kind.base is float or kind.base is int:
        has_type = is_number(value) and (kind.base is float or float(value).is_integer())
    else:
        has_type = isinstance(value, kind.base)
    return has_type and invalid_reason(value, dataclasses.replace(option, choices=())) is None
