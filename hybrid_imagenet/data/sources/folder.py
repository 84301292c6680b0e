"""Reads a tree of images, one directory per class: `train/n01440764/*.JPEG` and
`val/n01440764/*.JPEG`.

Classes without these two are divided into them (--val_fraction).
"""

from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path

import numpy as np

from hybrid_imagenet.data import listing, splits
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.images import MAX_BYTES, SUFFIXES
from hybrid_imagenet.data.sources.source import BadRecord, Source, check_directory
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.files import read_regular

# Of images, and of archives that may hold some, which are not read; "" is a file without a suffix.
_NOT_READ = frozenset(
    {"", ".avif", ".gz", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".ppm", ".tar", ".tif", ".tiff"}
    | {".7z", ".rar", ".tgz", ".zip"}
)


def find(request: DatasetRequest) -> SplitSummary:
    """Finds the class directories of a split, without a listing of their images."""
    names = _find(request.directory, request.split, request.val_fraction)[1]
    return SplitSummary(f"found in {request.directory}", len(names))


def open_split(request: DatasetRequest) -> Source:
    """Lists the images of a split."""
    return FolderSource(request.directory, request.split, request.val_fraction)


class FolderSource(Source):
    """Gives random access to the image files of a split.

    Classes are the directories of the training split, sorted by name; files are sorted within their
    class.

    Args:
      directory: holds `train` and `val`, or with `val_fraction` the class directories themselves,
      or `train` alone.
      split: "train" or "validation".
      val_fraction: the part of each class that is validated instead of trained on
        (`data.splits.of_class`).

    Raises:
      UserError: for a directory without classes or images, or a validation class that training does
        not have.
    """

    def __init__(self, directory: Path, split: str, val_fraction: float = 0.0) -> None:
        super().__init__()
        root, self.class_names, skipped = _find(directory, split, val_fraction)
        self.num_classes = len(self.class_names)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda name: _images(root / name), self.class_names))
        listed = [files for files, _ in found]
        for name, files in zip(self.class_names, listed, strict=True):
            if split == "train" and not files:
                skipped.add("a class without images", name)
        for name, (_, others) in zip(self.class_names, found, strict=True):
            for other, reason, fault in others:
                skipped.add(reason, f"{name}/{other}", fault=fault)
        self.notes = skipped.notes(str(root))
        if val_fraction:
            listed = [_part(files, val_fraction, split) for files in listed]
        self.root = str(root)
        self._names = [
            f"{name}/{file}"
            for name, files in zip(self.class_names, listed, strict=True)
            for file in files
        ]
        self._labels = np.repeat(
            np.arange(self.num_classes, dtype=np.int32), [len(files) for files in listed]
        )
        self.listing, self.num_examples = self._names, len(self._names)
        if not self.num_examples:
            if val_fraction and any(files for files, _ in found):
                raise UserError(
                    f"--val_fraction={val_fraction:g}: leaves no image for the split {split}"
                )
            hint = f"; {self.notes[0]}" if self.notes else ""
            raise UserError(
                f"{root}: its class directories hold no images"
                f" ({', '.join(sorted(SUFFIXES))}){hint}"
            )

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file; its image begins at 0."""
        return f"{self.root}/{self._names[index]}", 0

    def read_one(self, index: int) -> tuple[bytes, int]:
        file, offset = self.locate(index)
        try:
            content = read_regular(file, MAX_BYTES)
        except OSError as error:
            check_directory(file)
            raise BadRecord(file, offset, error.strerror or str(error)) from None
        self.reads.add(len(content))
        return content, int(self._labels[index])


def _find(
    directory: Path, split: str, val_fraction: float = 0.0
) -> tuple[Path, tuple[str, ...], listing.SkippedFiles]:
    """Returns where the class directories of a split lie, the names of the classes, and what lies
    beside them.

    Images are not listed.

    Raises:
      UserError: for a directory without classes, or a validation class that training does not have.
    """
    train = _whole(directory) if val_fraction else _split_directory(directory, "train")
    names = tuple(_classes(train))
    root, skipped = (
        train if val_fraction else _split_directory(directory, split),
        listing.SkippedFiles(),
    )
    found = set(_classes(root, skipped))
    unknown = sorted(found - set(names))
    if unknown:
        raise UserError(f"{root / unknown[0]}: no class of this name in the training split")
    for name in set(names) - found:
        skipped.add(f"no directory of this class in {root.name}", name)
    return root, names, skipped


def _split_directory(directory: Path, split: str) -> Path:
    found = listing.files_of_split(
        str(directory), split, lambda word: [word] if (directory / word).is_dir() else []
    )
    if not found:
        missing = (
            f"--data_dir={directory}: has no directory {' or '.join(listing.SPLIT_NAMES[split])}"
        )
        if split == "validation" or any(entry.is_dir() for entry in directory.iterdir()):
            missing += ": add --val_fraction=0.2 to validate a fifth of the images of each class"
        raise UserError(missing)
    return directory / found[0]


def _whole(directory: Path) -> Path:
    """Returns where the classes lie of images that are still to be divided."""
    for name in listing.SPLIT_NAMES["validation"]:
        if (directory / name).is_dir() and (directory / "train").is_dir():
            raise UserError(
                f"--val_fraction: {directory / name} has validation images already: omit it, or"
                " move it"
            )
    return directory / "train" if (directory / "train").is_dir() else directory


def _part(files: list[str], fraction: float, split: str) -> list[str]:
    held_out = splits.of_class(len(files), fraction)
    return [
        file for file, away in zip(files, held_out, strict=True) if away == (split == "validation")
    ]


def _classes(root: Path, skipped: listing.SkippedFiles | None = None) -> list[str]:
    names = []
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                names.append(entry.name)
            elif skipped is not None:
                fault = _suffix(entry.name) in SUFFIXES | _NOT_READ and not entry.name.startswith(
                    "."
                )
                skipped.add("not in a class directory", entry.name, fault=fault)
    if not names:
        raise UserError(
            f"{root}: has no class directories; put each image into a directory named after its"
            " class"
        )
    return sorted(names)


def _images(directory: Path) -> tuple[list[str], list[tuple[str, str, bool]]]:
    """Returns the images of a class, sorted, and what else lies there: name, reason and whether it
    may be an image.
    """
    files: list[str] = []
    others: list[tuple[str, str, bool]] = []
    if not directory.is_dir():
        return files, others
    with os.scandir(directory) as entries:
        for entry in entries:
            suffix = _suffix(entry.name)
            if entry.name.startswith("."):
                others.append((entry.name, "hidden", False))
            elif suffix in SUFFIXES and (
                entry.is_symlink() or entry.is_file(follow_symlinks=False)
            ):
                files.append(entry.name)
            elif suffix in SUFFIXES and not entry.is_dir():
                others.append((entry.name, "no regular file", True))
            elif entry.is_dir():
                others.append(
                    (
                        entry.name,
                        "a directory inside of a class directory: move its images out of it",
                        True,
                    )
                )
            else:
                kind = suffix or "a name without a suffix"
                reason = f"{kind} is not read ({', '.join(sorted(SUFFIXES))} are)"
                others.append((entry.name, reason, suffix in _NOT_READ))
    return sorted(files), others


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - a path object for each of a million files takes seconds
