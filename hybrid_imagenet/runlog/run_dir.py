"""Creates and claims the directory of a run, and never overwrites one silently."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
from typing import IO

from hybrid_imagenet.errors import UserError


class RunDirectory:
    """Holds one run's files, on rank 0, under a lock for as long as the run lasts.

    Attributes:
      path: the directory.
      resumed: whether it already held a run.
    """

    def __init__(self, path: pathlib.Path, *, resume: bool):
        """Creates or re-opens the directory and locks it.

        Raises:
          UserError: if it holds a run and `resume` is false, if it holds something else, if another run uses it, or
            if it or one of its files cannot be written.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
        except OSError as error:
            raise UserError(f"--run_dir={path}: {error.strerror}; give a directory that can be written") from None
        for name in ("config.json", "metrics.jsonl", "summary.json"):
            if (path / name).exists() and not (path / name).is_file():
                raise UserError(f"--run_dir={path}: {name} is not a regular file; move it away")
        others = [p.name for p in path.iterdir() if p.name != "lock"]
        self.resumed = (path / "config.json").exists()
        if self.resumed and not resume:
            raise UserError(f"--run_dir={path} holds a run: add --resume to go on in it, or give another directory")
        if others and not self.resumed:
            raise UserError(f"--run_dir={path} holds other files ({others[0]}): give a new or empty directory")

    def _acquire(self) -> IO[bytes]:
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)  # FIFOs do not wait
        file = os.fdopen(descriptor, "rb+", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(f"--run_dir={self.path} is in use by another run: wait for it or give another") from None
        return file

    def release(self) -> None:
        """Gives up the lock."""
        self._lock.close()

    def write_json(self, name: str, values: object) -> pathlib.Path:
        """Writes a JSON file of the run, replacing an older one atomically.

        Raises:
          UserError: if it cannot be written.
        """
        target = self.path / name
        temporary = target.with_name(f".{name}.tmp")
        try:
            temporary.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
            os.replace(temporary, target)  # noqa: PTH105 - atomic on POSIX, as documented
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise UserError(f"cannot write {target}: {error.strerror}; earlier results are intact") from None
        return target


def requested(path: str | None, recipe: str, dataset: str) -> pathlib.Path:
    """Returns the directory that --run_dir asks for, by default runs/RECIPE-DATASET, before a free name is chosen."""
    return pathlib.Path(path) if path else pathlib.Path("runs", f"{recipe}-{dataset}")


def chosen(path: str | None, recipe: str, dataset: str, *, resume: bool) -> pathlib.Path:
    """Returns the directory of a run: that of --run_dir, else the newest to resume, or the first free name."""
    base = requested(path, recipe, dataset)
    if path is not None:
        return base
    return newest_name(base) if resume else free_name(base)


def free_name(base: pathlib.Path) -> pathlib.Path:
    """Returns `base`, or `base-2`, `base-3`, ... : the first that does not exist."""
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


def newest_name(base: pathlib.Path) -> pathlib.Path:
    """Returns the last of `base`, `base-2`, ... that exists, or `base`."""
    candidate, number = base, 1
    while True:
        following = base.with_name(f"{base.name}-{number + 1}")
        if not following.exists():
            return candidate
        candidate, number = following, number + 1
