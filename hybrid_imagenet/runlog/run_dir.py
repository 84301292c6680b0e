"""Creates and locks the directory of a run, and never overwrites a run."""

from __future__ import annotations

import difflib
import errno
import itertools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import IO

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError

# One of two words is probably a misspelling of the other if both have this many letters and this
# ratio of `difflib`.
_MIN_WORD_LETTERS = 5
_MIN_SIMILARITY = 0.7


class RunDirectory:
    """Stores one run's files, on rank 0, and holds the lock while the run lasts.

    Attributes:
      path: The directory.
      resumed: Whether it already contained a run.
    """

    def __init__(self, path: pathlib.Path, *, resume: bool):
        """Creates or opens the directory and locks it.

        Args:
          path: The directory; it is created if it does not exist.
          resume: Whether it may contain a run, which then continues.

        Raises:
          UserError: If it contains a run and `resume` is false, if it contains other files, if
            another run uses it, or if it or one of its files cannot be written.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            self.resumed = _check_content(path, resume=resume)
            # `hybrid-imagenet stop` reads from the lock which process to signal.
            self._lock.truncate(0)
            self._lock.seek(0)
            self._lock.write(files.lock_holder_line())
        except OSError as error:
            raise _not_writable_error(path, error) from None

    def release(self) -> None:
        """Releases the lock."""
        self._lock.close()

    def write_json(self, name: str, values: object) -> pathlib.Path:
        """Writes a JSON file of the run, replacing an older one atomically.

        Raises:
          UserError: If it cannot be written.
        """
        target = self.path / name
        try:
            with files.atomic_replace(target) as temporary:
                temporary.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise UserError(
                f"{target} cannot be written: {error.strerror}. Earlier results are intact. Check"
                " the free space and the permissions of the directory."
            ) from None
        return target


def check_directory(path: pathlib.Path, *, resume: bool) -> str:
    """Checks whether `RunDirectory` would accept a directory, and leaves nothing behind.

    Returns:
      A description of the directory: "new", "empty" or "holds a run".

    Raises:
      UserError: See `RunDirectory`; also if `resume` names a directory that does not exist, next to
        a run whose name it misspells.
    """
    try:
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{existing} is not a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{existing} cannot be written")
        if existing != path:
            similar_run = _similar_run(path) if resume else None
            if similar_run is not None:
                raise UserError(
                    f"--run_dir={path} does not exist. Did you mean {similar_run}? To start a new"
                    " run there with --resume, create the directory."
                )
            _check_can_create(path, existing)
            return "new"
        if (path / "lock").exists():
            # This raises OSError, as a run would.
            files.open_lock(path).close()
            if files.lock_holder(path) is not None:
                raise _in_use_error(path)
    except OSError as error:
        raise _not_writable_error(path, error) from None
    return "holds a run" if _check_content(path, resume=resume) else "empty"


def _check_can_create(path: pathlib.Path, existing: pathlib.Path) -> None:
    """Raises OSError if a directory that does not exist cannot be created.

    Permissions do not show all causes: a broken symbolic link may have the name, a name may be too
    long, and some file systems, such as a full one or /proc, reject new directories.

    Args:
      path: The directory.
      existing: The nearest directory above it that exists.
    """
    missing = path.absolute().relative_to(existing.absolute())
    first = existing / missing.parts[0]
    if first.is_symlink():
        raise FileExistsError(errno.EEXIST, f"{first} is a broken symbolic link")
    if ".." in missing.parts:
        # It could lead out of the temporary directory below.
        return
    # The directories are created inside a temporary one, so that no other process sees them.
    with tempfile.TemporaryDirectory(prefix=".check-", dir=existing) as temporary:
        (pathlib.Path(temporary) / missing).mkdir(parents=True)


def _not_writable_error(path: pathlib.Path, error: OSError) -> UserError:
    return UserError(
        f"--run_dir={path} cannot be used: {error.strerror}. Pass a directory that can be written."
    )


def _in_use_error(path: pathlib.Path) -> UserError:
    return UserError(
        f"--run_dir={path} is in use by another run. Wait for it, or pass another directory."
    )


def _lock(path: pathlib.Path) -> IO[bytes]:
    """Locks a run directory.

    Raises:
      OSError: If the lock file cannot be opened.
      UserError: If another run holds the lock.
    """
    try:
        return files.lock(path)
    except BlockingIOError:
        raise _in_use_error(path) from None


def _check_content(path: pathlib.Path, *, resume: bool) -> bool:
    """Returns whether a directory contains a run.

    Raises:
      UserError: If a run cannot be written there.
    """
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        if (path / name).exists() and not (path / name).is_file():
            raise UserError(f"--run_dir={path}: {name} is not a regular file. Move it away.")
    names = [file.name for file in path.iterdir() if file.name != "lock"]
    contains_run = (path / "config.json").exists()
    if contains_run and not resume:
        raise UserError(
            f"--run_dir={path} contains a run. Add --resume to continue it, or pass another"
            " directory."
        )
    if names and not contains_run:
        raise UserError(
            f"--run_dir={path} contains other files ({names[0]}). Pass a new or an empty directory."
        )
    return contains_run


def _similar_run(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the run next to a missing directory whose name it probably misspells.

    Names are compared word by word. Names that differ in a number, a short word or a complete word
    belong to different runs: lars-2 and lars-3, adam and adamw, sgd-long and sgd-short.
    """
    if not path.parent.is_dir():
        return None
    for config in sorted(path.parent.glob("*/config.json")):
        if _are_similar(path.name, config.parent.name):
            return config.parent
    return None


def _are_similar(name: str, other_name: str) -> bool:
    words = _words(name)
    other_words = _words(other_name)
    if list(filter(str.isdigit, words)) != list(filter(str.isdigit, other_words)):
        return False
    if "".join(words) == "".join(other_words):
        return True
    if len(words) != len(other_words):
        return False
    return all(map(_may_be_misspelled, words, other_words))


def _words(name: str) -> list[str]:
    """Splits a name into its numbers and words, in lower case."""
    return re.findall(r"\d+|[^\W\d_]+", name.lower())


def _may_be_misspelled(word: str, other: str) -> bool:
    if word == other:
        return True
    if min(len(word), len(other)) < _MIN_WORD_LETTERS:
        return False
    return difflib.SequenceMatcher(None, word, other).ratio() >= _MIN_SIMILARITY


def choose_directory(
    path: str | None, recipe: str, dataset: str, *, resume: bool = False
) -> pathlib.Path:
    """Returns the directory of a run.

    Args:
      path: --run_dir. If None, the directory is runs/RECIPE-DATASET with a free number, or with the
        largest existing number for a resumed run.
      recipe: Name of the recipe.
      dataset: Name of the dataset.
      resume: Whether the run is resumed.

    Raises:
      UserError: If `path` is a URL.
    """
    if path:
        return files.output_path("--run_dir", path)
    base = pathlib.Path("runs", f"{recipe}-{dataset}")
    return latest_name(base) if resume else free_name(base)


def free_name(base: pathlib.Path) -> pathlib.Path:
    """Returns the first of `base`, `base-2`, `base-3`, ... that does not exist."""
    return next(path for path in _numbered_names(base) if not path.exists())


def latest_name(base: pathlib.Path) -> pathlib.Path:
    """Returns the last of `base`, `base-2`, ... that exists, or `base`."""
    latest = base
    for path in itertools.islice(_numbered_names(base), 1, None):
        if not path.exists():
            break
        latest = path
    return latest


def _numbered_names(base: pathlib.Path) -> Iterator[pathlib.Path]:
    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{base.name}-{number}")
