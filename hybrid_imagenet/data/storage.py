"""Opens the directory of a data set, at a path or a URL, and finds the files of a split in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hybrid_imagenet.data.directories import Directory, LocalDirectory
from hybrid_imagenet.data.remote import RemoteDirectory
from hybrid_imagenet.data.shards import SPLIT_NAMES
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


def of_split(names: Iterable[str], suffix: str, split: str) -> list[str]:
    """Returns the files of a split: those of the first name of it that a word of their path or name is.

    Args:
      names: of files.
      suffix: of those that count, such as ".tar".
      split: "train" or "validation", which is also called val and test.
    """
    candidates = [name for name in names if name.endswith(suffix)]
    for word in SPLIT_NAMES[split]:
        found = [name for name in candidates if word in _words(name.removesuffix(suffix))]
        if found:
            return found
    return []


def _words(name: str) -> list[str]:
    for separator in "/_.":
        name = name.replace(separator, "-")
    return name.split("-")
