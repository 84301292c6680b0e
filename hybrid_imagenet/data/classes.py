"""Compares names of classes: those that a file lists with the labels, those of one file or split with another's."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path

from hybrid_imagenet.data.listing import Note
from hybrid_imagenet.errors import UserError

LIST = "labels.txt"
_MOST = 1_000_000


def numbered(place: Path | str, count: int | None) -> tuple[str, ...]:
    """Returns numbers as names of classes.

    Raises:
      UserError: without a count, or for more than a million, which no network here has.
    """
    if count is None:
        raise UserError(f"--data_dir={place}: its files do not name the classes: give --num_classes")
    if count > _MOST:
        raise UserError(f"{place}: label {count - 1} is no class number: correct it, or give --num_classes")
    return tuple(str(number) for number in range(count))


def listed(place: Path | str, text: str) -> tuple[str, ...]:
    """Returns the names of classes in a text that has one on each line.

    Raises:
      UserError: if a name stands on several lines of the file `place`.
    """
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    name, count = collections.Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise UserError(
            f"{place}: lists {name!r} on {count} of {len(names)} lines: give each class a name of its own, or move the "
            "file away if it does not list classes"
        )
    return names


def against_labels(place: Path | str, names: Sequence[str], largest: int) -> tuple[Note, ...]:
    """Compares a list of classes with the largest label of the training images, from 0.

    Returns:
      A note if there are more names than labels.

    Raises:
      UserError: if there are fewer.
    """
    if largest >= len(names):
        raise UserError(
            f"{place}: lists {len(names)} classes, but a training image has the label {largest} (from 0): list all "
            "classes, or move the file away if it does not list classes"
        )
    if largest + 1 == len(names):
        return ()
    return (Note(f"{place}: lists {len(names)} classes, but no training image has a label above {largest}", False),)


def difference(first: Sequence[str], second: Sequence[str]) -> str | None:
    """Returns the first difference of two lists of classes; None for equal ones."""
    if len(first) != len(second):
        return f"{len(first)} classes and {len(second)}"
    pairs = enumerate(zip(first, second, strict=True))
    return next((f"class {number} is {a!r} and {b!r}" for number, (a, b) in pairs if a != b), None)


def check_splits(dataset: str, train: Sequence[str], validation: Sequence[str]) -> None:
    """Compares the classes of two splits.

    Raises:
      UserError: if they differ, unless one of them has numbers for names.
    """
    found = difference(train, validation)
    numbers = tuple(map(str, range(len(train))))
    if found and not (len(train) == len(validation) and numbers in (tuple(train), tuple(validation))):
        raise UserError(
            f"--dataset={dataset}: training and validation have different classes ({found}): make both with the same "
            "list of classes"
        )
