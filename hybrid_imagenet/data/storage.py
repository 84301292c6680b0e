"""Opens the directory of a data set, at a path or a URL, and finds the files of a split in it."""

from __future__ import annotations

from pathlib import Path

from hybrid_imagenet.data.directories import Directory, LocalDirectory
from hybrid_imagenet.data.remote import RemoteDirectory
from hybrid_imagenet.errors import UserError


def is_url(location: str) -> bool:
    """Returns whether a location is a URL, such as https://host/path, not a path of this host."""
    return "://" in location


def open_directory(location: str, cache_dir: str | None = None, timeout: float = 120.0) -> Directory:
    """Opens a local directory, or a URL of any kind that fsspec knows.

    Args:
      location: of the directory.
      cache_dir: local directory for copies of a URL's files; all ranks of a machine share it, and later runs.
      timeout: seconds for which a URL that fails is tried again.

    Raises:
      UserError: for a directory that does not exist, or a URL that cannot be used here.
    """
    check(location, cache_dir)
    if cache_dir is None or not is_url(location):
        return LocalDirectory(Path(location).expanduser())
    return RemoteDirectory(location, Path(cache_dir).expanduser(), timeout)


def check(location: str, cache_dir: str | None) -> None:
    """Raises UserError for a local directory that does not exist, or a URL without a place for copies of its files."""
    if not is_url(location):
        path = Path(location).expanduser()
        if not path.is_dir():
            raise UserError(f"--data_dir={path}: no such directory")
    elif cache_dir is None:
        raise UserError(f"--data_dir={location}: give a local directory for copies of its files as --data_cache_dir")
