"""Finds the files of a split by their names, and compares class lists."""

from __future__ import annotations

import collections
import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.files import decode_text

# These are the names that our own writer, TensorFlow's ImageNet scripts and TFDS use.
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val", "valid", "test")}
"""Names of each split in file names, in the order in which they are preferred."""
LABELS_FILE = "labels.txt"
"""The file that lists the names of classes, one on each line, in the order of the labels."""
# The last layer of a ResNet-50 has 2,048 weights for each class: 8 GB in FP32 for this many
# classes, and as much again for the gradient and for each slot of the optimizer. Larger numbers are
# mistakes that would exhaust memory.
MAX_CLASSES = 1_000_000
_NUMBER_OF_COUNT = re.compile(r"(?P<stem>.*?)(?P<number>\d+)-of-(?P<count>\d+)")
_TRAILING_NUMBER = re.compile(r"(?P<stem>.*?)(?P<number>\d+)$")


@dataclasses.dataclass(frozen=True)
class DatasetNote:
    """Describes in one line what a source skips, or which assumption it makes.

    Attributes:
      text: The line, which names a file or a directory.
      fault: True if images are missing or may be wrong, so that `data check` counts the note;
        False if it is harmless.
    """

    text: str
    fault: bool = True

    def __str__(self) -> str:
        return self.text


class SkippedFiles:
    """Collects the files that a source skips, by reason."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, bool], list[str]] = {}

    def add(self, reason: str, name: str, *, fault: bool = True) -> None:
        """Adds a file or a directory; for `fault` see `DatasetNote`."""
        self._names.setdefault((reason, fault), []).append(name)

    def notes(self, directory: str) -> tuple[DatasetNote, ...]:
        """Returns one note for each reason, with the number of files and the first.

        Args:
          directory: Directory of the files, for the text of the notes.
        """
        return tuple(
            DatasetNote(
                f"{directory}: {len(names)} skipped, {reason}; the first is {min(names)}", fault
            )
            for (reason, fault), names in sorted(self._names.items())
        )


def files_of_split(
    directory: str, split: str, files_by_split_name: Callable[[str], Sequence[str]]
) -> list[str]:
    """Returns the files of a split, under the first of its names that has files.

    The names of the training split are "train", those of the validation split "validation", "val",
    "valid" and "test".

    Args:
      directory: Directory of the files, for messages.
      split: "train" or "validation".
      files_by_split_name: Returns the files that have a given split name.

    Raises:
      UserError: If there are files under two of `validation`, `val` and `valid`, or if one file
        belongs to both splits.
    """
    files: dict[str, list[str]] = {}
    for split_names in SPLIT_NAMES.values():
        for split_name in split_names:
            files[split_name] = list(files_by_split_name(split_name))
    # "test" is not compared: many datasets have a test split next to the validation split.
    validation_sets = [files[name] for name in ("validation", "val", "valid") if files[name]]
    if len(validation_sets) > 1:
        first, second = validation_sets[:2]
        raise UserError(
            f"--data_dir={directory} holds two validation splits, {first[0]} and {second[0]}. Move"
            " one of them away."
        )
    files_by_split = {
        key: next((files[name] for name in split_names if files[name]), [])
        for key, split_names in SPLIT_NAMES.items()
    }
    in_both_splits = sorted({*files_by_split["train"]} & {*files_by_split["validation"]})
    if in_both_splits:
        raise UserError(
            f"--data_dir={directory}: {in_both_splits[0]} is named both train and validation."
            " Rename it."
        )
    return files_by_split[split]


def split_name_lookup(names: Iterable[str], suffix: str) -> Callable[[str], list[str]]:
    """Returns a function that finds the files whose path contains a split name.

    The split name must be a whole word. Words are separated by `-`, `/`, `_` or `.`.

    Args:
      names: Paths of files.
      suffix: Only files with this suffix are found.
    """
    words_by_name = {
        name: re.split(r"[-/_.]", name.removesuffix(suffix))
        for name in names
        if name.endswith(suffix)
    }

    def files_by_split_name(split_name: str) -> list[str]:
        return [name for name, words in words_by_name.items() if split_name in words]

    return files_by_split_name


def unassigned_files(
    directory: str, names: Iterable[str], files_by_split_name: Callable[[str], Sequence[str]]
) -> tuple[DatasetNote, ...]:
    """Returns a note on the files whose names contain no split name, if there are any.

    Args:
      directory: Directory of the files, for messages.
      names: All files.
      files_by_split_name: Returns the files that have a given split name.
    """
    unassigned = set(names)
    for split_names in SPLIT_NAMES.values():
        for split_name in split_names:
            unassigned.difference_update(files_by_split_name(split_name))
    skipped = SkippedFiles()
    for name in sorted(unassigned):
        skipped.add("neither train nor validation by their names", name)
    return skipped.notes(directory)


def complete_file_set(directory: str, split: str, names: Sequence[str]) -> list[str]:
    """Sorts the files of a split by name, after a check that none is missing.

    Only names such as `train-00003-of-00010` show that a file is missing.

    Args:
      directory: Directory of the files, for messages.
      split: "train" or "validation", for messages.
      names: The files.

    Raises:
      UserError: If a file of a numbered set is missing or there twice, or if the files belong to
        several sets or directories.
    """
    # Maps (stem, count), or (parent, 0) for files without "-of-", to the files by number.
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in sorted(names):
        match = _NUMBER_OF_COUNT.match(name)
        if match:
            key = match["stem"], int(match["count"])
            number = int(match["number"])
        else:
            key = name.rpartition("/")[0], 0
            number = len(sets.get(key, ()))
        same_number = sets.setdefault(key, {}).setdefault(number, name)
        if same_number != name:
            raise UserError(
                f"--data_dir={directory}: {same_number} and {name} are the same part of a set."
                " Remove one of them."
            )
    if len(sets) > 1:
        first, second = list(sets.values())[:2]
        raise UserError(
            f"--data_dir={directory} holds several sets of {split} files, such as"
            f" {first[min(first)]} and {second[min(second)]}. Keep only one set here."
        )
    for (_, count), name_by_number in sets.items():
        missing = [number for number in range(count) if number not in name_by_number]
        if missing:
            existing = name_by_number[min(name_by_number)]
            raise UserError(
                f"--data_dir={directory}: {len(missing)} of {count} {split} files are missing, the"
                f" first is number {missing[0]} of the set of {existing}. Copy them here."
            )
    return sorted(names)


def numbering_gaps(directory: str, names: Iterable[str]) -> Iterator[DatasetNote]:
    """Yields a note for each series of numbered files that has gaps.

    Numbers that are mostly gaps do not count files: WordNet's n01440764 is an example. They are
    ignored.

    Args:
      directory: Directory of the files, for the text of the notes.
      names: The files.
    """
    series: dict[str, dict[int, str]] = {}
    for name in names:
        match = _TRAILING_NUMBER.match(str(PurePath(name).with_suffix("")))
        # Names with "-of-" have been checked by `complete_file_set`.
        if match and not _NUMBER_OF_COUNT.match(name):
            series.setdefault(match["stem"], {})[int(match["number"])] = name
    for name_by_number in series.values():
        first = min(name_by_number)
        last = max(name_by_number)
        num_missing = last - first + 1 - len(name_by_number)
        if 0 < num_missing <= len(name_by_number):
            first_missing = next(
                number for number in range(first, last) if number not in name_by_number
            )
            yield DatasetNote(
                f"{directory}: {num_missing} files are missing between {name_by_number[first]} and"
                f" {name_by_number[last]}, the first is number {first_missing}: copy them, or"
                " rename the others"
            )


def numbered_class_names(location: Path | str, num_classes: int | None) -> tuple[str, ...]:
    """Returns the class numbers "0", "1", ... as names.

    Args:
      location: Directory or file of the labels, for messages.
      num_classes: Number of classes; None if neither the files nor the user state it.

    Raises:
      UserError: If the number is None or above `MAX_CLASSES`.
    """
    if num_classes is None:
        raise UserError(
            f"--data_dir={location}: the files do not name the classes. Set --num_classes."
        )
    if num_classes > MAX_CLASSES:
        raise UserError(
            f"{location}: label {num_classes - 1} is too large to be a class number. Correct it, or"
            " set --num_classes."
        )
    return tuple(str(number) for number in range(num_classes))


def parse_class_list(file: Path | str, content: bytes) -> tuple[str, ...]:
    """Returns the class names in a file that has one on each line.

    Args:
      file: The file, for messages.
      content: What it contains.

    Raises:
      UserError: If the content is not text, is empty, names a class on several lines, or has lines
        of the form `NUMBER:NAME`.
    """
    try:
        text = decode_text(content)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not names:
        raise UserError(f"{file} is empty. Write one class name on each line, or remove the file.")
    if all(name.partition(":")[0].isdecimal() and ":" in name for name in names):
        raise UserError(
            f"{file} has lines such as {names[0]!r}. Write one class name on each line, in the"
            " order of labels, without numbers and without a class for the background."
        )
    name, count = collections.Counter(map(normalize_name, names)).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{file} lists {name!r} on {count} of {len(names)} lines. Give each class its own name,"
            " or move the file away if it does not list classes."
        )
    return names


def check_labels(
    class_list: Path | str, names: Sequence[str], largest_label: int
) -> tuple[DatasetNote, ...]:
    """Compares a class list with the largest label of the training images.

    Args:
      class_list: The file with the names, for messages.
      names: The class names in it.
      largest_label: The largest label; labels begin with 0.

    Returns:
      A note if there are more names than labels, else nothing.

    Raises:
      UserError: If there are fewer names than labels.
    """
    if largest_label >= len(names):
        raise UserError(
            f"{class_list} lists {len(names)} classes, but a training image has the label"
            f" {largest_label} (labels begin with 0). List all classes, or move the file away if"
            " it does not list classes."
        )
    if largest_label + 1 == len(names):
        return ()
    text = surplus_classes_message(class_list, len(names), largest_label)
    return (DatasetNote(text, fault=False),)


def surplus_classes_message(class_list: Path | str, num_classes: int, largest_label: int) -> str:
    """Returns a line that says that a class list has more names than there are labels."""
    return (
        f"{class_list}: lists {num_classes} classes, but no training image has a label above"
        f" {largest_label}"
    )


def normalize_name(name: str) -> str:
    """Returns a class name in the composed Unicode form (NFC), to compare it with another.

    Linux keeps file names as they were written, but a Mac writes them in the decomposed form. The
    two forms of a name look equal.
    """
    return unicodedata.normalize("NFC", name)


def class_difference(first: Sequence[str], second: Sequence[str]) -> str | None:
    """Describes the first difference between two class lists, or returns None.

    The Unicode form of a name makes no difference.
    """
    if len(first) != len(second):
        return f"{len(first)} classes and {len(second)}"
    for number, (name, other_name) in enumerate(zip(first, second, strict=True)):
        if normalize_name(name) != normalize_name(other_name):
            return f"class {number} is {name!r} and {other_name!r}"
    return None


def class_name_difference(first: Sequence[str], second: Sequence[str]) -> str | None:
    """Describes the first difference between two class lists, if both have real names.

    Numbers are what a source uses if it does not know names, so a list of numbers differs from
    another list only in its length.

    Returns:
      The difference, or None.
    """
    numbers = [str(number) for number in range(len(first))]
    one_has_numbers = numbers in (list(first), list(second))
    if len(first) == len(second) and one_has_numbers:
        return None
    return class_difference(first, second)


def check_splits(dataset: str, train: Sequence[str], validation: Sequence[str]) -> None:
    """Compares the class names of the two splits.

    Raises:
      UserError: If they differ, unless one of the splits has numbers for names.
    """
    difference = class_name_difference(train, validation)
    if difference is not None:
        raise UserError(
            f"--dataset={dataset}: training and validation have different classes ({difference})."
            " Make both with the same class list."
        )
