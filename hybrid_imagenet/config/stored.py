"""Reads config.json, the settings and the environment with which a run was started."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.config.flags import OPTIONS
from hybrid_imagenet.errors import UserError
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

_LAST_DATE = 253402300799  # 31 December 9999 in seconds since 1970; later dates cannot be written

_KINDS = {
    "flags": FieldType(
        "an object with the flags of a run",
        lambda value: isinstance(value, dict),
        null=False,
        required=True,
    ),
    "origins": FieldType("an object of texts", object_of(is_text), null=False),
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
"""Values that programs calculate with or act on. All others are only shown."""


def read(directory: pathlib.Path) -> dict[str, Any]:
    """Reads the config.json of a run.

    A flag that this version does not have may hold anything. So may a choice that it does not have.

    Args:
      directory: of the run.

    Raises:
      UserError: if the file cannot be read, or a value is of a wrong kind or out of bounds.
    """
    path = directory / "config.json"
    values = files.read_json(path)
    json_fields.check_fields(values, _KINDS, str(path))
    for name, value in values["flags"].items():
        if name in OPTIONS and not _is_possible(value, OPTIONS[name]):
            raise UserError(
                f"{path}: the flag {name} is {json_fields.shorten_json(value)}, which it cannot be."
                " Restore the file from a copy."
            )
    return values


def _is_possible(value: Any, option: Option) -> bool:
    """Returns whether a flag can have a value: its type is right, and it is within the flag's
    bounds.
    """
    kind = option.kind
    if value is None:
        return kind.optional
    if kind.repeated:
        one = dataclasses.replace(option, kind=dataclasses.replace(kind, repeated=False))
        return isinstance(value, list) and all(_is_possible(item, one) for item in value)
    if kind.base is float or kind.base is int:
        of_kind = is_number(value) and (kind.base is float or float(value).is_integer())
    else:
        of_kind = isinstance(value, kind.base)
    return of_kind and invalid_reason(value, dataclasses.replace(option, choices=())) is None
