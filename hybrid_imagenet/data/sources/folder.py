"""Reads a tree of images, one directory per class: `train/n01440764/*.JPEG` and `val/n01440764/*.JPEG`."""

from __future__ import annotations

import concurrent.futures
import os
import time
from pathlib import Path

import numpy as np

from hybrid_imagenet.data.shards import SPLIT_NAMES
from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.errors import UserError

SUFFIXES = frozenset({".jpeg", ".jpg", ".png", ".bmp", ".gif"})


class FolderSource(Source):
    """Gives random access to the image files of a split.

    Classes are the directories of the training split, sorted by name; files are sorted within their class.

    Raises:
      UserError: for a directory without classes or images, or a validation class that training does not have.
    """

    def __init__(self, directory: Path, split: str) -> None:
        """Lists the files, without opening them."""
        super().__init__()
        if not directory.is_dir():
            raise UserError(f"--data_dir={directory}: no such directory")
        self.class_names = tuple(_classes(_split_directory(directory, "train")))
        self.num_classes = len(self.class_names)
        root = _split_directory(directory, split)
        unknown = sorted(set(_classes(root)) - set(self.class_names))
        if unknown:
            raise UserError(f"{root / unknown[0]}: no class of this name in the training split")
        try:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                listed = list(pool.map(lambda name: _images(root / name), self.class_names))
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
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


def _split_directory(directory: Path, split: str) -> Path:
    names = SPLIT_NAMES[split]
    found = next((directory / name for name in names if (directory / name).is_dir()), None)
    if found is None:
        raise UserError(f"--data_dir={directory}: has no directory {' or '.join(names)}")
    return found


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
