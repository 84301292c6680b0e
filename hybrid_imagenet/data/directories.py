"""Reads files of a directory by name; `data.remote` does the same with those at a URL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hybrid_imagenet.data.listing import SPLIT_NAMES
from hybrid_imagenet.data.sources.source import Reads, read_at
from hybrid_imagenet.errors import without_secrets
from hybrid_imagenet.files import MAX_TEXT_BYTES, open_regular, read_regular

SUBDIRECTORIES = ("data", *(name for names in SPLIT_NAMES.values() for name in names))


class Directory:
    """Files of a directory of this host, and of its subdirectories `data` and those named after
    splits.

    Attributes:
      location: as the user gave it, without passwords.
      reads: counts what is read from storage.
      remote: whether files are copied before they are read.
    """

    remote = False

    def __init__(self, location: str) -> None:
        self.location = without_secrets(location)
        self._path = Path(location)
        self.reads = Reads()

    def names(self) -> list[str]:
        """Returns the files, sorted, those of a subdirectory as `train/name`."""
        places = {"": self._path} | {f"{name}/": self._path / name for name in SUBDIRECTORIES}
        return sorted(
            prefix + e.name
            for prefix, place in places.items()
            if place.is_dir()
            for e in place.iterdir()
        )

    def small(self, name: str) -> bytes | None:
        """Returns the content of a small file; None where there is no such file."""
        try:
            return read_regular(self.path(name), MAX_TEXT_BYTES)
        except FileNotFoundError:
            return None

    def path(self, name: str) -> Path:
        """Returns where a file can be read on this host, after it has been copied where that is
        needed.

        Raises:
          OSError: if there is no such file.
          StorageError: if a URL does not answer.
        """
        return self._path / name

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Returns bytes of a file; fewer only at its end. Raises as `path`."""
        return read_at(str(self.path(name)), offset, length, self.reads)

    def tail(self, name: str, length: int) -> bytes:
        """Returns the last bytes of a file, all of a shorter one, without a copy; raises as
        `path`.
        """
        with open_regular(self.path(name)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - length))
            return file.read()

    def index_path(self, name: str) -> Path | None:
        """Returns where the index of a copy is kept, as long as the copy is; None for a local
        file.
        """
        del name
        return None

    def look_up(self, names: Sequence[str]) -> None:
        """Asks for the sizes of files together, which is faster than one after another; raises as
        `path`.
        """

    def prefetch(self, names: Sequence[str]) -> None:
        """Says which files are read next, so that they can be copied ahead."""

    def where(self, name: str) -> str:
        """Returns the name of a file for messages."""
        return f"{self.location.rstrip('/')}/{name}"
