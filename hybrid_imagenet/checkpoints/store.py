"""Finds checkpoints, keeps the newest good ones of a run and its best one, and sets damaged ones
aside.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.archive import Arrays, Checkpoint, DamagedCheckpointError
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.errors import UserError

_NAME = re.compile(r"step-(\d{9})\.npz")
_DAMAGED = ".damaged"
FOREIGN_SUFFIXES = (".safetensors", ".pth", ".pt")
_FORMS = "a checkpoint (step-*.npz), the directory of a run, or weights (.safetensors, .pth)"
_Found = TypeVar("_Found")
Report = Callable[[str], None]
Check = Callable[[Mapping[str, Any]], object]


class Description(NamedTuple):
    """Where a checkpoint lies, and what it says of the run that wrote it; empty for files of other
    libraries.
    """

    path: pathlib.Path
    meta: Mapping[str, Any]


def look(path: pathlib.Path) -> Description:
    """Reads the description of a checkpoint, or of the newest readable one of a run, without its
    arrays.

    Raises:
      UserError: if there is no such file, or nothing there is a checkpoint.
    """
    path = path.expanduser()
    if path.is_dir():
        found = newest(path / "checkpoints") or newest(path)
        if found is None:
            raise UserError(
                f"{path}: holds no usable checkpoint (checkpoints/step-*.npz); give another run"
            )
        return found
    if not path.exists():
        raise UserError(f"{path}: no such file or directory; give {_FORMS}")
    if not path.is_file():  # a pipe or a device, which may never end
        raise UserError(f"{path} is not a regular file. Pass {_FORMS}.")
    if path.suffix in FOREIGN_SUFFIXES:
        return Description(path, {})
    if path.suffix == ".keras":
        raise UserError(
            f"{path}: a model that Keras has saved: load it with keras.saving.load_model, or give"
            f" {_FORMS}"
        )
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: not a checkpoint, or one that is cut short; give {_FORMS}")
    try:
        return Description(path, archive.read_meta(path))
    except DamagedCheckpointError as error:
        raise UserError(f"{error}; give {_FORMS}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file that can be read") from None


def newest(directory: pathlib.Path, check: Check | None = None) -> Description | None:
    """Returns the description of the newest checkpoint in a directory that can be used; None
    without one.

    Args:
      directory: need not exist.
      check: raises ValueError for a description that lacks what the checkpoint is needed for.
    """
    for path in CheckpointFolder(directory, lambda _: None).paths():
        try:
            meta = archive.read_meta(path)
            if check is not None:
                check(meta)
            return Description(path, meta)
        except (
            DamagedCheckpointError,
            OSError,
            ValueError,
        ):  # set aside, and reported, when the run starts
            continue
    return None


def check_run(meta: Mapping[str, Any]) -> None:
    """Checks that a run can continue from a checkpoint: its checksums have told that nothing was
    altered.

    Raises:
      ValueError: naming what is missing, or of the form of another version.
    """
    try:
        RunState.from_dict(meta["state"])
        sums = meta["epoch_sums"]
        if not isinstance(sums, list) or len(sums) != meta["world_size"]:
            raise ValueError(f"epoch_sums has no row for each of {meta['world_size']} ranks")
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"its description is not that of a run ({' '.join(str(error).split())})"
        ) from None


class CheckpointFolder:
    """Finds checkpoints in a directory and changes nothing there: it may belong to a run under
    way.
    """

    def __init__(self, directory: pathlib.Path, report: Report):
        """Takes a directory, which need not exist, and what receives a line about each unusable
        checkpoint.
        """
        self.directory = directory
        self._report = report

    def paths(self) -> list[pathlib.Path]:
        """Returns all paths that bear the name of a checkpoint, newest first."""
        if not self.directory.is_dir():
            return []
        return sorted(
            (p for p in self.directory.iterdir() if _NAME.fullmatch(p.name)), reverse=True
        )

    def newest_good(self) -> Checkpoint | None:
        """Returns the newest checkpoint whose checksums and description are right, if there is
        one.
        """
        return self._first_good(self.paths())

    def best_good(self) -> Checkpoint | None:
        """Returns the good checkpoint whose own validation top-1 is highest, the earliest of equal
        ones.

        None if none was saved right after a validation.
        """
        scores = {path: self._attempt(path, _own_top1) for path in reversed(self.paths())}
        scored = {path: top1 for path, top1 in scores.items() if top1 is not None}
        return self._first_good(sorted(scored, key=lambda path: scored[path], reverse=True))

    def _first_good(self, paths: Sequence[pathlib.Path]) -> Checkpoint | None:
        found = (self._attempt(path, self._read) for path in paths)
        return next((checkpoint for checkpoint in found if checkpoint is not None), None)

    def _attempt(self, path: pathlib.Path, read: Callable[[pathlib.Path], _Found]) -> _Found | None:
        """Returns what `read` finds in a file; None if it cannot be used, which is reported."""
        try:
            return read(path)
        except FileNotFoundError:  # the run that continues there has removed it
            return None
        except (DamagedCheckpointError, OSError) as error:
            self._reject(path, error)
            return None

    def _read(self, path: pathlib.Path) -> Checkpoint:
        return archive.read(path)

    def _reject(self, path: pathlib.Path, error: Exception) -> None:
        self._report(f"checkpoint passed over: {error}")


class _Known(NamedTuple):
    """A file that was found good: its signature at that time, and its own validation top-1."""

    signature: tuple[int, ...]
    top1: float | None


class CheckpointStore(CheckpointFolder):
    """Writes, finds and removes the checkpoints of the run that rank 0 works on.

    Writing happens in a thread; at most one write is under way, and an error of the thread is
    raised by the next call. A file counts towards `keep` only if it is good; one that is not is
    renamed to `step-*.npz.damaged`.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        keep: int,
        *,
        keep_best: bool = False,
        report: Report = lambda _: None,
    ):
        """Takes the directory, which is created at the first write.

        Args:
          directory: holds nothing else.
          keep: the newest good checkpoints that stay.
          keep_best: the one with the highest validation top-1 of its own (`val_top1`) stays too.
          report: receives a line about each file that is set aside; called by the thread that owns
            the store.
        """
        super().__init__(directory, report)
        self.keep = keep
        self._keep_best = keep_best
        self._known: dict[pathlib.Path, _Known] = {}
        self._notes: list[str] = []  # of the writing thread
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int, arrays: Arrays, meta: Mapping[str, Any]) -> None:
        """Starts writing the checkpoint of a step; the arrays must not change any more.

        Raises:
          UserError: if this or the previous write failed, naming the directory and the cause.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(step, arrays, meta), name="checkpoint"
        )
        self._thread.start()

    @property
    def writing(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Returns when no write is under way.

        Raises:
          UserError: if the last write failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._tell()
        if self._error is not None:
            error, self._error = self._error, None
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            before = "those written before are intact" if self.paths() else "none has been written"
            raise UserError(
                f"cannot write a checkpoint to {self.directory}: {reason}; {before}, free space or"
                " allow access and start again with --resume"
            )

    def newest_good(self) -> Checkpoint | None:
        """Returns the newest good checkpoint, if there is one; what is damaged among newer ones is
        set aside.
        """
        found = super().newest_good()
        self._tell()
        return found

    def set_aside(self) -> list[pathlib.Path]:
        """Returns the damaged files that this session and earlier ones have renamed."""
        return sorted(self.directory.glob(f"step-*.npz{_DAMAGED}*"))

    def _tell(self) -> None:
        while self._notes:
            self._report(self._notes.pop(0))

    def _write(self, step: int, arrays: Arrays, meta: Mapping[str, Any]) -> None:
        try:
            self.directory.mkdir(
                exist_ok=True
            )  # not its parents: a run directory that was deleted stays so
            for leftover in self.directory.glob(".step-*.tmp"):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            path = self.directory / f"step-{step:09d}.npz"
            if os.path.lexists(path):
                self._is_good(path)  # if not, it is set aside rather than replaced
            archive.write(path, arrays, meta)
            self._known[path] = _Known(_signature(path), meta.get("val_top1"))
            self._remove_old()
        except Exception as error:  # raised again by the next call, in the training thread
            self._error = error

    def _remove_old(self) -> None:
        """Removes good checkpoints that are neither among the newest `keep` nor the best."""
        good = [path for path in self.paths() if self._is_good(path)]
        kept = set(good[: self.keep])
        scores = {
            path: top1 for path in reversed(good) if (top1 := self._known[path].top1) is not None
        }
        if self._keep_best and scores:
            kept.add(max(scores, key=lambda path: scores[path]))
        for path in good:
            if path not in kept:
                path.unlink(missing_ok=True)
                del self._known[path]

    def _is_good(self, path: pathlib.Path) -> bool:
        """Returns whether a file is good; one that has not changed since it was found good is not
        read again.
        """

        def verify(path: pathlib.Path) -> bool:
            known = self._known.get(path)
            return (known is not None and known.signature == _signature(path)) or bool(
                self._read(path, arrays=False)
            )

        return bool(self._attempt(path, verify))

    def _read(self, path: pathlib.Path, *, arrays: bool = True) -> Checkpoint:
        signature = _signature(path)
        checkpoint = archive.read(path, arrays=arrays)
        try:
            check_run(checkpoint.meta)
        except ValueError as error:
            raise DamagedCheckpointError(f"{path}: {error}") from None
        step = checkpoint.meta["state"]["step"]
        if step != step_of(path):
            raise DamagedCheckpointError(f"{path}: it holds step {step}")
        self._known[path] = _Known(signature, checkpoint.meta.get("val_top1"))
        return checkpoint

    def _reject(self, path: pathlib.Path, error: Exception) -> None:
        if not isinstance(error, DamagedCheckpointError):
            self._notes.append(f"checkpoint passed over: {error}")
            return
        place = path.with_name(path.name + _DAMAGED)
        number = 1
        while os.path.lexists(place):
            number += 1
            place = path.with_name(f"{path.name}{_DAMAGED}-{number}")
        try:
            path.rename(place)
        except OSError as problem:
            self._notes.append(
                f"checkpoint passed over: {error}; it cannot be renamed: {problem.strerror}"
            )
        else:
            self._notes.append(f"damaged checkpoint set aside as {place.name}: {error}")


def step_of(path: pathlib.Path) -> int:
    """Returns the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def _own_top1(path: pathlib.Path) -> float | None:
    top1 = archive.read_meta(path).get("val_top1")
    return top1 if isinstance(top1, float) else None


def _signature(path: pathlib.Path) -> tuple[int, ...]:
    """Returns what changes when a file is written to or replaced; damage that leaves it equal is
    found on reading.
    """
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
