"""Finds the files of a split by their names, counts what is not read, and compares lists of
classes.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.files import decode_text

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val", "valid", "test")}
"""Names of the splits in names of files, as used by our own writer, TensorFlow's ImageNet scripts,
and TFDS.
"""
LABELS = "labels.txt"
"""The file that lists the names of classes, one on each line, in the order of the labels."""
# The last layer of a ResNet-50 has 2,048 weights for each class: 8 GB in FP32 for this many
# classes, and as much again for the gradient and for each slot of the optimizer. Larger numbers are
# mistakes that would exhaust memory.
MOST_CLASSES = 1_000_000
_OF = re.compile(r"(?P<stem>.*?)(?P<number>\d+)-of-(?P<count>\d+)")
_NUMBER = re.compile(r"(?P<stem>.*?)(?P<number>\d+)$")


@dataclasses.dataclass(frozen=True)
class Note:
    """What a source does not read, or reads on an assumption, in one line.

    Attributes:
      text: the line, with a file or directory.
      fault: whether images are missing or may be wrong, so that `data check` counts it; else it is
        harmless.
    """

    text: str
    fault: bool = True

    def __str__(self) -> str:
        return self.text


class Skipped:
    """Counts the files that a listing does not read, by the reason."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, bool], list[str]] = {}

    def add(self, reason: str, name: str, *, fault: bool = True) -> None:
        """Counts a file or a directory."""
        self._found.setdefault((reason, fault), []).append(name)

    def notes(self, place: str) -> tuple[Note, ...]:
        """Returns one line for each reason, which names the first file below `place` in the order
        of names.
        """
        return tuple(
            Note(f"{place}: {len(names)} skipped, {reason}; the first is {min(names)}", fault)
            for (reason, fault), names in sorted(self._found.items())
        )


def of_split(place: str, split: str, named: Callable[[str], Sequence[str]]) -> list[str]:
    """Returns the files of a split under the first of its names that has some: train; validation,
    val, valid or test.

    Args:
      place: the directory, for messages.
      split: "train" or "validation".
      named: returns the files of a name.

    Raises:
      UserError: if there are files of two of `validation`, `val` and `valid`, or if one belongs to
        both splits.
    """
    found = {word: list(named(word)) for words in SPLIT_NAMES.values() for word in words}
    several = [found[word][0] for word in ("validation", "val", "valid") if found[word]]
    if len(several) > 1:
        raise UserError(
            f"--data_dir={place}: holds two validation splits, {several[0]} and {several[1]}: move"
            " one of them away"
        )
    first = {
        key: next((found[word] for word in words if found[word]), [])
        for key, words in SPLIT_NAMES.items()
    }
    both = sorted(set(first["train"]) & set(first["validation"]))
    if both:
        raise UserError(
            f"--data_dir={place}: {both[0]} is named both train and validation: rename it"
        )
    return first[split]


def with_word(names: Iterable[str], suffix: str) -> Callable[[str], list[str]]:
    """Returns a function that finds the files with a word in their name, or in that of their
    directory.
    """
    words = {
        name: re.split(r"[-/_.]", name.removesuffix(suffix))
        for name in names
        if name.endswith(suffix)
    }
    return lambda word: [name for name in words if word in words[name]]


def of_no_split(
    place: str, names: Iterable[str], named: Callable[[str], Sequence[str]]
) -> tuple[Note, ...]:
    """Returns a note on the files that have the name of no split; for the arguments see
    `of_split`.
    """
    skipped = Skipped()
    for name in sorted(
        {*names}.difference(*(named(word) for words in SPLIT_NAMES.values() for word in words))
    ):
        skipped.add("neither train nor validation by their names", name)
    return skipped.notes(place)


def whole_set(place: str, split: str, names: Sequence[str]) -> list[str]:
    """Returns the files of a split in the order of their names, after a look at names such as
    `train-00003-of-00010`.

    Raises:
      UserError: if a file of such a numbered set is missing, or if the files are of several sets or
        directories.
    """
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in sorted(names):
        match = _OF.match(name)
        key = (match["stem"], int(match["count"])) if match else (name.rpartition("/")[0], 0)
        number = int(match["number"]) if match else len(sets.get(key, ()))
        other = sets.setdefault(key, {}).setdefault(number, name)
        if other != name:
            raise UserError(
                f"--data_dir={place}: {other} and {name} are the same part of a set: remove one of"
                " them"
            )
    if len(sets) > 1:
        first, second = (found[min(found)] for found in list(sets.values())[:2])
        raise UserError(
            f"--data_dir={place}: holds several sets of {split} files, such as {first} and"
            f" {second}: keep one set here"
        )
    for (_, count), found in sets.items():
        missing = [number for number in range(count) if number not in found]
        if missing:
            raise UserError(
                f"--data_dir={place}: {len(missing)} of {count} {split} files are missing, the"
                f" first is number {missing[0]} of the set of {found[min(found)]}"
            )
    return sorted(names)


def gaps(place: str, names: Iterable[str]) -> Iterator[Note]:
    """Yields a note for each series of numbered files that lacks numbers between its first and its
    last.

    Names whose numbers are no series, such as WordNet's n01440764, lack more than they have: these
    are passed over.
    """
    series: dict[str, dict[int, str]] = {}
    for name in names:
        match = _NUMBER.match(str(PurePath(name).with_suffix("")))
        if match and not _OF.match(name):
            series.setdefault(match["stem"], {})[int(match["number"])] = name
    for found in series.values():
        first, last = min(found), max(found)
        missing = last - first + 1 - len(found)
        if 0 < missing <= len(found):
            lacks = next(number for number in range(first, last) if number not in found)
            yield Note(
                f"{place}: {missing} files are missing between {found[first]} and {found[last]},"
                f" the first is number {lacks}: copy them, or rename the others"
            )


def numbered_classes(place: Path | str, count: int | None) -> tuple[str, ...]:
    """Returns numbers as names of classes.

    Raises:
      UserError: without a count, or for more than a million, which no network here has.
    """
    if count is None:
        raise UserError(
            f"--data_dir={place}: its files do not name the classes: give --num_classes"
        )
    if count > MOST_CLASSES:
        raise UserError(
            f"{place}: label {count - 1} is no class number: correct it, or give --num_classes"
        )
    return tuple(str(number) for number in range(count))


def listed_classes(place: Path | str, content: bytes) -> tuple[str, ...]:
    """Returns the names of classes in a file that has one on each line.

    Raises:
      UserError: if the file `place` is not text, is empty, names a class on several lines, or has
        lines as `NUMBER:NAME`.
    """
    try:
        text = decode_text(content)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not names:
        raise UserError(f"{place}: is empty: give the name of one class on each line, or remove it")
    if all(name.partition(":")[0].isdecimal() and ":" in name for name in names):
        raise UserError(
            f"{place}: has lines as {names[0]!r}: give the name of one class on each line, in the"
            " order of labels, without numbers and without a class for the background"
        )
    name, count = collections.Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{place}: lists {name!r} on {count} of {len(names)} lines: give each class a name of"
            " its own, or move the file away if it does not list classes"
        )
    return names


def check_labels(place: Path | str, names: Sequence[str], largest: int) -> tuple[Note, ...]:
    """Compares a list of classes with the largest label of the training images, from 0.

    Returns:
      A note if there are more names than labels.

    Raises:
      UserError: if there are fewer.
    """
    if largest >= len(names):
        raise UserError(
            f"{place}: lists {len(names)} classes, but a training image has the label {largest}"
            " (from 0): list all classes, or move the file away if it does not list classes"
        )
    return () if largest + 1 == len(names) else (Note(surplus(place, len(names), largest), False),)


def surplus(place: Path | str, listed: int, largest: int) -> str:
    """Returns a line on a list that names more classes than the training images have labels."""
    return f"{place}: lists {listed} classes, but no training image has a label above {largest}"


def class_difference(first: Sequence[str], second: Sequence[str]) -> str | None:
    """Returns the first difference of two lists of classes; None for equal ones."""
    if len(first) != len(second):
        return f"{len(first)} classes and {len(second)}"
    pairs = enumerate(zip(first, second, strict=True))
    return next((f"class {number} is {a!r} and {b!r}" for number, (a, b) in pairs if a != b), None)


def name_difference(first: Sequence[str], second: Sequence[str]) -> str | None:
    """Returns the first difference of two lists of classes; None also if one of two equally long
    ones has numbers.
    """
    numbers = [str(number) for number in range(len(first))]
    numbered = len(first) == len(second) and numbers in (list(first), list(second))
    return None if numbered else class_difference(first, second)


def check_splits(dataset: str, train: Sequence[str], validation: Sequence[str]) -> None:
    """Compares the classes of two splits.

    Raises:
      UserError: if they differ, unless one of them has numbers for names.
    """
    if found := name_difference(train, validation):
        raise UserError(
            f"--dataset={dataset}: training and validation have different classes ({found}): make"
            " both with the same list of classes"
        )
