"""Finds the files of a split by their names, and counts what is not read; needs the standard library only."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath

from hybrid_imagenet.errors import UserError

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val", "test")}
"""Names of the splits in names of files, as used by our own writer, TensorFlow's ImageNet scripts, and TFDS."""
_OF = re.compile(r"(?P<stem>.*?)(?P<number>\d+)-of-(?P<count>\d+)")
_NUMBER = re.compile(r"(?P<stem>.*?)(?P<number>\d+)$")


@dataclasses.dataclass(frozen=True)
class Note:
    """What a source does not read, or reads on an assumption, in one line.

    Attributes:
      text: the line, with a file or directory.
      fault: whether images are missing or may be wrong, so that `data check` counts it; else it is harmless.
    """

    text: str
    fault: bool = True

    def __str__(self) -> str:
        """Returns the line."""
        return self.text


class Skipped:
    """Counts the files that a listing does not read, by the reason."""

    def __init__(self) -> None:
        """Starts with none."""
        self._found: dict[tuple[str, bool], list[str]] = {}

    def add(self, reason: str, name: str, *, fault: bool = True) -> None:
        """Counts a file or a directory."""
        self._found.setdefault((reason, fault), []).append(name)

    def notes(self, place: str) -> tuple[Note, ...]:
        """Returns one line for each reason, which names the first file below `place` in the order of names."""
        return tuple(
            Note(f"{place}: {len(names)} skipped, {reason}; the first is {min(names)}", fault)
            for (reason, fault), names in sorted(self._found.items())
        )


def of_split(place: str, split: str, named: Callable[[str], Sequence[str]]) -> list[str]:
    """Returns the files of a split under the first of its names that has some: train; validation, val or test.

    Args:
      place: the directory, for messages.
      split: "train" or "validation".
      named: returns the files of a name.

    Raises:
      UserError: if there are files of both `validation` and `val`, or if one belongs to both splits.
    """
    found = {word: list(named(word)) for words in SPLIT_NAMES.values() for word in words}
    if found["validation"] and found["val"]:
        raise UserError(
            f"--data_dir={place}: holds two validation splits, {found['validation'][0]} and {found['val'][0]}: move "
            "one of them away"
        )
    first = {key: next((found[word] for word in words if found[word]), []) for key, words in SPLIT_NAMES.items()}
    both = sorted(set(first["train"]) & set(first["validation"]))
    if both:
        raise UserError(f"--data_dir={place}: {both[0]} is named both train and validation: rename it")
    return first[split]


def with_word(names: Iterable[str], suffix: str) -> Callable[[str], list[str]]:
    """Returns a function that finds the files with a word in their name, or in that of their directory."""
    words = {name: re.split(r"[-/_.]", name.removesuffix(suffix)) for name in names if name.endswith(suffix)}
    return lambda word: [name for name in words if word in words[name]]


def of_no_split(place: str, names: Iterable[str], named: Callable[[str], Sequence[str]]) -> tuple[Note, ...]:
    """Returns a note on the files that have the name of no split; for the arguments see `of_split`."""
    skipped = Skipped()
    for name in sorted({*names}.difference(*(named(word) for words in SPLIT_NAMES.values() for word in words))):
        skipped.add("neither train nor validation by their names", name)
    return skipped.notes(place)


def whole_set(place: str, split: str, names: Sequence[str]) -> list[str]:
    """Returns the files of a split in the order of their names, after a look at names such as `train-00003-of-00010`.

    Raises:
      UserError: if a file of such a numbered set is missing, or if the files are of several sets or directories.
    """
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in sorted(names):
        match = _OF.match(name)
        key = (match["stem"], int(match["count"])) if match else (name.rpartition("/")[0], 0)
        number = int(match["number"]) if match else len(sets.get(key, ()))
        other = sets.setdefault(key, {}).setdefault(number, name)
        if other != name:
            raise UserError(f"--data_dir={place}: {other} and {name} are the same part of a set: remove one of them")
    if len(sets) > 1:
        first, second = (found[min(found)] for found in list(sets.values())[:2])
        raise UserError(
            f"--data_dir={place}: holds several sets of {split} files, such as {first} and {second}: keep one set here"
        )
    for (_, count), found in sets.items():
        missing = [number for number in range(count) if number not in found]
        if missing:
            raise UserError(
                f"--data_dir={place}: {len(missing)} of {count} {split} files are missing, the first is number "
                f"{missing[0]} of the set of {found[min(found)]}"
            )
    return sorted(names)


def gaps(place: str, names: Iterable[str]) -> Iterator[Note]:
    """Yields a note for each series of numbered files that lacks numbers between its first and its last.

    Names whose numbers are no series, such as WordNet's n01440764, lack more than they have: these are passed over.
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
                f"{place}: {missing} files are missing between {found[first]} and {found[last]}, the first is number "
                f"{lacks}: copy them, or rename the others"
            )
