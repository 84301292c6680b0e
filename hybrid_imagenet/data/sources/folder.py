"""Reads a tree of images, one directory per class: `train/n01440764/*.JPEG` and `val/n01440764/*.JPEG`.

Classes without these two are divided into them (--val_fraction).
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from pathlib import Path

import numpy as np

from hybrid_imagenet.data.shards import SPLIT_NAMES
from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import class_split

SUFFIXES = frozenset({".jpeg", ".jpg", ".png", ".bmp", ".gif"})


class FolderSource(Source):
    """Gives random access to the image files of a split.

    Classes are the directories of the training split, sorted by name; files are sorted within their class.

    Args:
      directory: holds `train` and `val`, or with `val_fraction` the class directories themselves, or `train` alone.
      split: "train" or "validation".
      val_fraction: the part of each class that is validated instead of trained on (`numerics.class_split`).

    Raises:
      UserError: for a directory without classes or images, or a validation class that training does not have.
    """

    def __init__(self, directory: Path, split: str, val_fraction: float = 0.0) -> None:
        """Lists the files, without opening them."""
        super().__init__()
        root, self.class_names = find(directory, split, val_fraction)
        self.num_classes = len(self.class_names)
        try:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                listed = list(pool.map(lambda name: _images(root / name), self.class_names))
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
        if val_fraction:
            listed = [_part(files, val_fraction, split) for files in listed]
        self._root = str(root)
        self._names = [f"{name}/{file}" for name, files in zip(self.class_names, listed, strict=True) for file in files]
        self._labels = np.repeat(np.arange(self.num_classes, dtype=np.int32), [len(files) for files in listed])
        self.num_examples = len(self._names)
        if not self.num_examples:
            raise UserError(f"{root}: its class directories hold no images ({', '.join(sorted(SUFFIXES))})")

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file; its image begins at 0."""
        return f"{self._root}/{self._names[index]}", 0

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads one file."""
        file, offset = self.locate(index)
        started = time.perf_counter()
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            raise BadRecord(file, offset, error.strerror or str(error)) from None
        self.io.add(len(content), 1, time.perf_counter() - started)
        return content, int(self._labels[index])


def find(directory: Path, split: str, val_fraction: float = 0.0) -> tuple[Path, tuple[str, ...]]:
    """Returns where the class directories of a split lie, and the names of the classes; lists no images.

    Raises:
      UserError: for a directory without classes, or a validation class that training does not have.
    """
    if not directory.is_dir():
        raise UserError(f"--data_dir={directory}: no such directory")
    train = _whole(directory) if val_fraction else _split_directory(directory, "train")
    names = tuple(_classes(train))
    root = train if val_fraction else _split_directory(directory, split)
    unknown = sorted(set(_classes(root)) - set(names))
    if unknown:
        raise UserError(f"{root / unknown[0]}: no class of this name in the training split")
    return root, names


def _split_directory(directory: Path, split: str) -> Path:
    names = SPLIT_NAMES[split]
    found = next((directory / name for name in names if (directory / name).is_dir()), None)
    if found is None:
        missing = f"--data_dir={directory}: has no directory {' or '.join(names)}"
        flat = _images_by_class(directory) if split == "train" else []
        if flat or split == "validation":
            some = ", ".join([*flat[:3], *(["..."] if len(flat) > 3 else [])])
            what = f" but {len(flat)} of images ({some})" if flat else ""
            missing += f"{what}: add --val_fraction=0.2 to validate a fifth of the images of each class"
        raise UserError(missing)
    return found


def _whole(directory: Path) -> Path:
    """Returns where the classes lie of images that are still to be divided."""
    for name in SPLIT_NAMES["validation"]:
        if (directory / name).is_dir() and (directory / "train").is_dir():
            raise UserError(f"--val_fraction: {directory / name} holds validation images already: leave it out")
    return directory / "train" if (directory / "train").is_dir() else directory


def _images_by_class(directory: Path) -> list[str]:
    """Returns the directories in `directory` that hold images."""
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and _images(Path(entry.path)))


def _part(files: list[str], fraction: float, split: str) -> list[str]:
    held_out = class_split.held_out(len(files), fraction)
    return [file for file, away in zip(files, held_out, strict=True) if away == (split == "validation")]


def _classes(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{root}: has no class directories; put each image into a directory named after its class")
    return names


def _images(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if Path(entry.name).suffix.lower() in SUFFIXES)
