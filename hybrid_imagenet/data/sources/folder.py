"""Reads a tree of images with one directory per class.

The tree has the form `train/n01440764/*.JPEG` and `val/n01440764/*.JPEG`. If it has no directory
of validation images, --val_fraction divides the images of each class.
"""

from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data import listing, splits
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.images import MAX_BYTES, SUFFIXES
from hybrid_imagenet.data.sources.source import BadRecord, Source, raise_if_file_may_be_intact
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.files import read_regular

# Listing a directory waits for storage, above all for a network file system, so directories are
# listed by several threads.
_LISTING_THREADS = 8
_MAX_NAMED_CLASSES = 10
_UNSUPPORTED_IMAGE_SUFFIXES = frozenset(
    (".avif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".ppm", ".tif", ".tiff")
)
_ARCHIVE_SUFFIXES = frozenset((".7z", ".gz", ".rar", ".tar", ".tgz", ".zip"))
# Files that are not read but may be images: those in other formats, archives, and files without a
# suffix. Skipping one counts as a fault, because training would miss its images.
_POSSIBLE_IMAGE_SUFFIXES = _UNSUPPORTED_IMAGE_SUFFIXES | _ARCHIVE_SUFFIXES | {""}


def probe_split(request: DatasetRequest) -> SplitSummary:
    """Finds the class directories of a split, without listing all of their images."""
    split = _find_split(request.directory, request.split, request.val_fraction)
    if request.split == "train":
        with concurrent.futures.ThreadPoolExecutor(_LISTING_THREADS) as pool:
            class_has_image = list(pool.map(_has_image, split.directories()))
        _check_empty_classes(split, class_has_image, request.num_classes)
    return SplitSummary(f"found in {request.directory}", len(split.class_names))


def open_split(request: DatasetRequest) -> Source:
    """Lists the images of a split."""
    return FolderSource(request.directory, request.split, request.val_fraction, request.num_classes)


class FolderSource(Source):
    """Gives random access to the image files of a split.

    The directories of the training split are the classes, sorted by name. Files are sorted within
    their class.

    Args:
      directory: Contains `train` and `val`. With `val_fraction` it contains the class directories
        themselves, or only `train`.
      split: "train" or "validation".
      val_fraction: Fraction of each class that is used for validation instead of training (see
        `data.splits.validation_mask`); 0 if the two splits have their own directories.
      num_classes: Number of class directories, which says that those without images are meant to
        be classes; None if it was not given.

    Raises:
      UserError: If there are no classes or no images, if a training class has no images, or if a
        validation class does not exist in the training split.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        val_fraction: float = 0.0,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        tree = _find_split(directory, split, val_fraction)
        self.root = str(tree.root)
        self.class_names = tree.class_names
        self.num_classes = len(self.class_names)
        listings = self._list_classes(tree)
        if split == "train":
            class_has_image = [bool(class_listing.images) for class_listing in listings]
            _check_empty_classes(tree, class_has_image, num_classes)
        self.notes = tree.skipped.notes(self.root)
        images = [class_listing.images for class_listing in listings]
        if val_fraction:
            images = [_select_split(names, val_fraction, split) for names in images]
        self._names: list[str] = []
        for directory_name, names in zip(tree.directory_names, images, strict=True):
            self._names += [f"{directory_name}/{name}" for name in names]
        class_sizes = [len(names) for names in images]
        self._labels = np.repeat(np.arange(self.num_classes, dtype=np.int32), class_sizes)
        self.file_names = self._names
        self.num_examples = len(self._names)
        if self.num_examples == 0:
            has_images = any(class_listing.images for class_listing in listings)
            if val_fraction and has_images:
                raise UserError(
                    f"--val_fraction={val_fraction:g} leaves no image for the {split} split. A"
                    " class needs at least two images to be divided, so add images."
                )
            suffixes = ", ".join(sorted(SUFFIXES))
            first_note = f" {self.notes[0]}" if self.notes else ""
            raise UserError(
                f"The class directories in {tree.root} contain no images ({suffixes}). Add images,"
                f" or correct --data_dir.{first_note}"
            )

    def _list_classes(self, tree: _Tree) -> list[_ClassListing]:
        """Lists the class directories, and adds skipped files to `tree.skipped`."""
        with concurrent.futures.ThreadPoolExecutor(_LISTING_THREADS) as pool:
            listings = list(pool.map(_list_class, tree.directories()))
        for class_name, class_listing in zip(tree.directory_names, listings, strict=True):
            for name, reason, is_fault in class_listing.skipped:
                tree.skipped.add(reason, f"{class_name}/{name}", fault=is_fault)
        return listings

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file of an image, and offset 0."""
        return f"{self.root}/{self._names[index]}", 0

    def stored_labels(self) -> npt.NDArray[np.int64]:
        return self._labels.astype(np.int64)

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads a whole file."""
        file, offset = self.locate(index)
        try:
            content = read_regular(file, MAX_BYTES)
        except OSError as error:
            raise_if_file_may_be_intact(file, error)
            raise BadRecord(file, offset, error.strerror or str(error)) from None
        self.reads.add(len(content))
        return content, int(self._labels[index])


class _Tree(NamedTuple):
    """The class directories of a split.

    Attributes:
      root: The directory that contains the class directories.
      class_names: Names of the classes, sorted.
      directory_names: Name of the directory of each class. It may have another Unicode form than
        the class name, and it may be missing from `root`.
      skipped: Counts what else is in `root`, and classes of training that are missing.
    """

    root: Path
    class_names: tuple[str, ...]
    directory_names: tuple[str, ...]
    skipped: listing.SkippedFiles

    def directories(self) -> list[Path]:
        """Returns the directory of each class."""
        return [self.root / name for name in self.directory_names]


class _ClassListing(NamedTuple):
    """The files of a class.

    Attributes:
      images: Names of the images, sorted.
      skipped: Name, reason, and whether it may be an image, of each entry that is not read.
    """

    images: list[str]
    skipped: list[tuple[str, str, bool]]


def _find_split(directory: Path, split: str, val_fraction: float = 0.0) -> _Tree:
    """Finds the class directories of a split, without listing their images.

    Raises:
      UserError: If there are no classes, or if a validation class does not exist in the training
        split.
    """
    if val_fraction:
        train_root = _find_undivided_root(directory)
    else:
        train_root = _find_split_root(directory, "train")
    class_names = tuple(_list_class_names(train_root))
    root = train_root if val_fraction else _find_split_root(directory, split)
    skipped = listing.SkippedFiles()
    # The two splits may have been copied from different systems, so compare normalized names.
    split_names = {listing.normalize_name(name): name for name in _list_class_names(root, skipped)}
    directory_names = []
    for class_name in class_names:
        directory_name = split_names.pop(listing.normalize_name(class_name), None)
        if directory_name is None:
            skipped.add(f"no directory of this class in {root.name}", class_name)
        directory_names.append(directory_name or class_name)
    if split_names:
        name = min(split_names.values())
        raise UserError(
            f"The training split has no class {name!r}, but {root / name} exists. Rename that"
            " directory, or move it away."
        )
    return _Tree(root, class_names, tuple(directory_names), skipped)


def _check_empty_classes(tree: _Tree, class_has_image: list[bool], num_classes: int | None) -> None:
    """Raises UserError if training classes have no images, unless their number was given.

    Such directories are often not meant as classes: file systems, archives and network drives
    create `lost+found`, `__MACOSX` and `@eaDir`.

    Args:
      tree: The class directories of the training split.
      class_has_image: For each class, whether it has an image.
      num_classes: Number of classes that the user has given, if any.
    """
    # If no class has an image, something else is wrong, and `FolderSource` reports it.
    if all(class_has_image) or not any(class_has_image) or num_classes == len(class_has_image):
        return
    names = []
    for name, has_image in zip(tree.class_names, class_has_image, strict=True):
        if not has_image:
            names.append(name)
    shown_names = ", ".join(names[:_MAX_NAMED_CLASSES])
    if len(names) > _MAX_NAMED_CLASSES:
        shown_names += f" and {len(names) - _MAX_NAMED_CLASSES} more"
    raise UserError(
        f"{len(names)} of {len(class_has_image)} class directories in {tree.root} have no images:"
        f" {shown_names}. Move them away, or set --num_classes={len(class_has_image)} to keep them"
        " as classes."
    )


def _find_split_root(directory: Path, split: str) -> Path:
    """Returns the directory of a split, such as `train`.

    Raises:
      UserError: If there is none.
    """

    def subdirectories(name: str) -> list[str]:
        return [name] if (directory / name).is_dir() else []

    names = listing.files_of_split(str(directory), split, subdirectories)
    if names:
        return directory / names[0]
    message = f"--data_dir={directory} has no directory {' or '.join(listing.SPLIT_NAMES[split])}."
    if split == "validation" or any(entry.is_dir() for entry in directory.iterdir()):
        raise UserError(
            f"{message} Add --val_fraction=0.2 to use a fifth of the images of each class for"
            " validation."
        )
    raise UserError(f"{message} Correct --data_dir.")


def _find_undivided_root(directory: Path) -> Path:
    """Returns the directory of the classes that --val_fraction divides.

    Raises:
      UserError: If there is a directory of validation images already.
    """
    train = directory / "train"
    if not train.is_dir():
        return directory
    for name in listing.SPLIT_NAMES["validation"]:
        if (directory / name).is_dir():
            raise UserError(
                f"--val_fraction was set, but {directory / name} has validation images already."
                " Omit --val_fraction, or move that directory away."
            )
    return train


def _select_split(names: list[str], val_fraction: float, split: str) -> list[str]:
    """Returns the images of one class that --val_fraction assigns to a split."""
    is_validation = splits.validation_mask(len(names), val_fraction)
    if split != "validation":
        return [name for name, held_out in zip(names, is_validation, strict=True) if not held_out]
    return [name for name, held_out in zip(names, is_validation, strict=True) if held_out]


def _list_class_names(root: Path, skipped: listing.SkippedFiles | None = None) -> list[str]:
    """Returns the sorted class directories, and adds other entries to `skipped`.

    Raises:
      UserError: If there are none, or if two of them differ only in their Unicode form.
    """
    class_names = []
    with os.scandir(root) as entries:
        for entry in entries:
            is_hidden = entry.name.startswith(".")
            if entry.is_dir() and not is_hidden:
                class_names.append(entry.name)
            elif skipped is not None:
                may_be_image = _suffix(entry.name) in SUFFIXES | _POSSIBLE_IMAGE_SUFFIXES
                skipped.add(
                    "not in a class directory", entry.name, fault=may_be_image and not is_hidden
                )
    if not class_names:
        raise UserError(
            f"{root} has no class directories. Move each image into a directory that is named after"
            " its class."
        )
    class_names.sort()
    first_by_key: dict[str, str] = {}
    for name in class_names:
        first = first_by_key.setdefault(listing.normalize_name(name), name)
        if first != name:
            raise UserError(
                f"{root}: the class directories {first!a} and {name!a} differ only in"
                " their Unicode form. Move the images of one of them into the other."
            )
    return class_names


def _has_image(directory: Path) -> bool:
    """Returns whether a class has an image, without listing all of its files."""
    with os.scandir(directory) as entries:
        return any(_is_image(entry) for entry in entries)


def _is_image(entry: os.DirEntry[str]) -> bool:
    is_hidden = entry.name.startswith(".")
    return not is_hidden and _suffix(entry.name) in SUFFIXES and _is_file_or_link(entry)


def _list_class(directory: Path) -> _ClassListing:
    """Lists the files of a class; a directory that does not exist has none."""
    images: list[str] = []
    skipped: list[tuple[str, str, bool]] = []
    if not directory.is_dir():
        return _ClassListing(images, skipped)
    with os.scandir(directory) as entries:
        for entry in entries:
            suffix = _suffix(entry.name)
            if _is_image(entry):
                images.append(entry.name)
            elif entry.name.startswith("."):
                skipped.append((entry.name, "hidden", False))
            elif suffix in SUFFIXES and not entry.is_dir():
                skipped.append((entry.name, "not a regular file", True))
            elif entry.is_dir():
                reason = "a directory inside a class directory: move its images out of it"
                skipped.append((entry.name, reason, True))
            else:
                form = suffix or "a name without a suffix"
                reason = f"{form} is not supported ({', '.join(sorted(SUFFIXES))} are)"
                skipped.append((entry.name, reason, suffix in _POSSIBLE_IMAGE_SUFFIXES))
    return _ClassListing(sorted(images), skipped)


def _is_file_or_link(entry: os.DirEntry[str]) -> bool:
    # Looking at the target of a link would take a system call for each one. A link to something
    # other than a file is a bad record when it is read.
    return entry.is_symlink() or entry.is_file(follow_symlinks=False)


def _suffix(name: str) -> str:
    # os.path.splitext, because a path object for each of a million files takes seconds.
    return os.path.splitext(name)[1].lower()  # noqa: PTH122
