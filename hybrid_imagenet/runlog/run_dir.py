"""Creates and claims the directory of a run, and never overwrites one silently."""

from __future__ import annotations

import difflib
import errno
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import IO

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError

# Two words of which one is probably a misspelling of the other: letters of the shorter one, and how
# alike they are.
_LONG, _ALIKE = 5, 0.7


class RunDirectory:
    """Holds one run's files, on rank 0, under a lock for as long as the run lasts."""

    def __init__(self, path: pathlib.Path, *, resume: bool):
        """Creates or re-opens the directory and locks it.

        Raises:
          UserError: if it holds a run and `resume` is false, if it holds something else, if another
            run uses it, or if it or one of its files cannot be written.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _acquire(path)
            self.resumed = _check_content(path, resume=resume)
            self._lock.truncate(0)
            self._lock.seek(0)
            self._lock.write(files.lock_holder_line())  # for `hybrid-imagenet stop`
        except OSError as error:
            raise _unusable(path, error) from None

    def release(self) -> None:
        """Gives up the lock."""
        self._lock.close()

    def write_json(self, name: str, values: object) -> pathlib.Path:
        """Writes a JSON file of the run, replacing an older one atomically.

        Raises:
          UserError: if it cannot be written.
        """
        target = self.path / name
        try:
            with files.atomic_replace(target) as temporary:
                temporary.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write {target}: {error.strerror}; earlier results are intact"
            ) from None
        return target


def check_directory(path: pathlib.Path, *, resume: bool) -> str:
    """Checks what `RunDirectory` would find, and changes nothing.

    Returns:
      What the directory is, for people.

    Raises:
      UserError: as `RunDirectory`; and if `resume` names a directory that does not exist, beside a
        run whose name it misspells.
    """
    try:
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{existing} is not a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{existing} cannot be written")
        if existing != path:
            if resume and (meant := _misspelled(path)):
                raise UserError(
                    f"--run_dir={path} does not exist: did you mean {meant}? Create the directory"
                    " if --resume is to start a new run there"
                )
            return "new"
        if (path / "lock").exists():
            files.open_lock(path).close()  # raises OSError as a run would
            if files.lock_holder(path) is not None:
                raise _in_use(path)
    except OSError as error:
        raise _unusable(path, error) from None
    return "holds a run" if _check_content(path, resume=resume) else "empty"


def _unusable(path: pathlib.Path, error: OSError) -> UserError:
    return UserError(f"--run_dir={path}: {error.strerror}; give a directory that can be written")


def _acquire(path: pathlib.Path) -> IO[bytes]:
    """Locks a run directory; raises OSError if its file cannot be opened, UserError if another run
    holds it.
    """
    try:
        return files.lock(path)
    except BlockingIOError:
        raise _in_use(path) from None


def _in_use(path: pathlib.Path) -> UserError:
    return UserError(f"--run_dir={path} is in use by another run: wait for it or give another")


def _check_content(path: pathlib.Path, *, resume: bool) -> bool:
    """Returns whether a directory holds a run; raises UserError if a run cannot be written
    there.
    """
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        if (path / name).exists() and not (path / name).is_file():
            raise UserError(f"--run_dir={path}: {name} is not a regular file; move it away")
    others = [p.name for p in path.iterdir() if p.name != "lock"]
    holds_run = (path / "config.json").exists()
    if holds_run and not resume:
        raise UserError(
            f"--run_dir={path} holds a run: add --resume to continue it, or give another directory"
        )
    if others and not holds_run:
        raise UserError(
            f"--run_dir={path} holds other files ({others[0]}): give a new or empty directory"
        )
    return holds_run


def _misspelled(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the run beside a missing directory whose name it probably misspells.

    Names are compared word by word. Names that differ in a number, a short word or a whole word
    belong to different runs: lars-2 and lars-3, adam and adamw, sgd-long and sgd-short.
    """
    if not path.parent.is_dir():
        return None
    runs = (place.parent for place in sorted(path.parent.glob("*/config.json")))
    return next((run for run in runs if _similar(path.name, run.name)), None)


def _similar(one: str, other: str) -> bool:
    words, others = (re.findall(r"\d+|[^\W\d_]+", text.lower()) for text in (one, other))
    if [word for word in words if word.isdigit()] != [word for word in others if word.isdigit()]:
        return False
    if "".join(words) == "".join(others):
        return True
    return len(words) == len(others) and all(
        a == b
        or (min(len(a), len(b)) >= _LONG and difflib.SequenceMatcher(None, a, b).ratio() >= _ALIKE)
        for a, b in zip(words, others, strict=True)
    )


def choose_directory(
    path: str | None, recipe: str, dataset: str, *, resume: bool = False
) -> pathlib.Path:
    """Returns the directory that a run takes: --run_dir, else runs/RECIPE-DATASET with a number
    that is free.

    A run that is resumed takes the one with the largest number. A URL raises UserError.
    """
    if path:
        return files.output_path("--run_dir", path)
    base = pathlib.Path("runs", f"{recipe}-{dataset}")
    return latest_name(base) if resume else free_name(base)


def free_name(base: pathlib.Path) -> pathlib.Path:
    """Returns `base`, or `base-2`, `base-3`, ... : the first that does not exist."""
    return next(place for place in itertools.chain([base], _following(base)) if not place.exists())


def latest_name(base: pathlib.Path) -> pathlib.Path:
    """Returns the last of `base`, `base-2`, ... that exists, or `base`."""
    return [base, *itertools.takewhile(pathlib.Path.exists, _following(base))][-1]


def _following(base: pathlib.Path) -> Iterator[pathlib.Path]:
    return (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
