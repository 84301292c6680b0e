"""Checks the values of a JSON object that a person or another program may have changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_imagenet.errors import UserError

# Reports calculate with floating-point numbers, which cannot represent all larger whole numbers.
_MAX_NUMBER = 1e15
_MAX_SHOWN_CHARACTERS = 80


@dataclasses.dataclass(frozen=True)
class FieldType:
    """The type that the value of a key must have.

    Attributes:
      name: Name of the form for messages, such as "a number".
      accepts: Whether a value is of this type.
      null: Whether null is accepted too.
      required: Whether the key must be present. Otherwise it may be missing.
    """

    name: str
    accepts: Callable[[Any], bool]
    null: bool = True
    required: bool = False


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number; true and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Also false for NaN. Python compares an integer of any size with a float, but cannot convert
    # an integer of hundreds of digits to one.
    return abs(value) <= _MAX_NUMBER


def is_count(value: Any) -> bool:
    """Returns whether a value is a whole number of at least 0."""
    return is_number(value) and value >= 0 and float(value).is_integer()


def is_text(value: Any) -> bool:
    """Returns whether a value is a string."""
    return isinstance(value, str)


def list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a function that checks whether a value is a list of accepted values."""
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def object_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a function that checks whether a value is an object of accepted values."""
    return lambda value: isinstance(value, dict) and all(map(accepts, value.values()))


NUMBER = FieldType("a number", is_number)
NON_NEGATIVE = FieldType("a number from 0", lambda value: is_number(value) and value >= 0)
COUNT = FieldType("a whole number from 0", is_count)
TEXT = FieldType("a text", is_text)
BOOLEAN = FieldType("true or false", lambda value: isinstance(value, bool))


def check_fields(
    values: Mapping[str, Any], field_types: Mapping[str, FieldType], location: str
) -> None:
    """Checks the values of an object.

    Args:
      values: The object; keys without a type may have any value.
      field_types: The type of each key.
      location: Location of the object, such as the path of its file, for messages.

    Raises:
      UserError: For the first value that is missing or of another type.
    """
    for key, field_type in field_types.items():
        if key not in values:
            if field_type.required:
                raise UserError(f"{location}: {key} is missing. Restore the file from a copy.")
            continue
        value = values[key]
        if value is None and field_type.null:
            continue
        if not field_type.accepts(value):
            raise UserError(
                f"{location}: {key} is {shorten_json(value)}, not {field_type.name}."
                " Restore the file from a copy."
            )


def shorten_json(value: Any) -> str:
    """Returns a value as JSON; a long one is cut."""
    text = json.dumps(value)
    if len(text) <= _MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:_MAX_SHOWN_CHARACTERS]}..."
