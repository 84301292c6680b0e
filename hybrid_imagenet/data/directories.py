"""Reads files of a local directory by name; `data.remote` reads those at a URL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hybrid_imagenet.data.listing import SPLIT_NAMES
from hybrid_imagenet.data.sources.source import ReadCounter, read_at
from hybrid_imagenet.errors import without_secrets
from hybrid_imagenet.files import MAX_TEXT_BYTES, open_regular, read_regular

SUBDIRECTORIES = ("data", *(name for names in SPLIT_NAMES.values() for name in names))
"""Subdirectories that may hold files of a dataset: `data`, and those named after splits."""


class Directory:
    """Gives access to the files of a local directory and its `SUBDIRECTORIES`.

    Files are named relative to the directory, as in `train/name`.

    Attributes:
      location: The path or URL that the user set, without passwords.
      reads: Counters of reads from storage.
      remote: Whether files are copied before they are read.
    """

    remote = False

    def __init__(self, location: str) -> None:
        """Keeps the path; no file is read.

        Args:
          location: The path that the user set.
        """
        self.location = without_secrets(location)
        self._path = Path(location)
        self.reads = ReadCounter()

    def list_files(self) -> list[str]:
        """Returns the names of all files, sorted."""
        names = []
        for subdirectory in ("", *SUBDIRECTORIES):
            path = self._path / subdirectory
            prefix = f"{subdirectory}/" if subdirectory else ""
            if path.is_dir():
                names += [prefix + entry.name for entry in path.iterdir()]
        return sorted(names)

    def read_small_file(self, name: str) -> bytes | None:
        """Returns the content of a small file, or None if there is no such file."""
        try:
            return read_regular(self.local_path(name), MAX_TEXT_BYTES)
        except FileNotFoundError:
            return None

    def local_path(self, name: str) -> Path:
        """Returns the path of a file on this host; a remote file is copied first.

        Raises:
          OSError: If there is no such file.
          StorageError: If a URL does not answer.
        """
        return self._path / name

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Returns `length` bytes from `offset` on, or fewer at the end of the file.

        Raises:
          OSError: If there is no such file.
          StorageError: If a URL does not answer.
        """
        return read_at(str(self.local_path(name)), offset, length, self.reads)

    def read_tail(self, name: str, length: int) -> bytes:
        """Returns the last `length` bytes of a file, or the whole file if it is shorter.

        A remote file is not copied for this.

        Raises:
          OSError: If there is no such file.
          StorageError: If a URL does not answer.
        """
        with open_regular(self.local_path(name)) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - length))
            return file.read()

    def index_path(self, name: str) -> Path | None:
        """Returns the path for the index of a remote file, or None for a local file.

        The index is stored next to the file's copy, because it is valid as long as the copy is.
        """
        del name
        return None

    def look_up_sizes(self, names: Sequence[str]) -> None:
        """Asks the server for the sizes of many files at once.

        Nothing is done for local files. One call is faster than one call for each file.

        Raises:
          OSError: If there is no such file.
          StorageError: If a URL does not answer.
        """

    def prefetch(self, names: Sequence[str]) -> None:
        """Starts to copy the files that will be read next; does nothing for local ones."""

    def display_name(self, name: str) -> str:
        """Returns the full name of a file for messages."""
        return f"{self.location.rstrip('/')}/{name}"
