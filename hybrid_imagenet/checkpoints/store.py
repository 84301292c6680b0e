"""Finds, writes and removes the checkpoints of a run.

`CheckpointStore` keeps the latest valid checkpoints and the best one, and renames damaged files.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.archive import Arrays, CheckpointArchive, DamagedCheckpointError
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.errors import UserError

_NAME = re.compile(r"step-(\d{9})\.npz")
_DAMAGED_SUFFIX = ".damaged"
FOREIGN_SUFFIXES = (".safetensors", ".pth", ".pt")
_ACCEPTED_FORMS = (
    "a checkpoint (step-*.npz), the directory of a run, or weights (.safetensors, .pth)"
)
_Result = TypeVar("_Result")
Log = Callable[[str], None]
Check = Callable[[Mapping[str, Any]], object]


class CheckpointDescription(NamedTuple):
    """Holds the path of a checkpoint and the description of the run that wrote it.

    The description is empty for files of other libraries.
    """

    path: pathlib.Path
    meta: Mapping[str, Any]


def find_checkpoint(path: pathlib.Path) -> CheckpointDescription:
    """Finds a checkpoint and reads its description, but not its arrays.

    Args:
      path: A checkpoint, weights of another library, or the directory of a run, whose latest
        readable checkpoint is taken.

    Raises:
      UserError: If there is no such file, or nothing there is a checkpoint.
    """
    path = path.expanduser()
    if path.is_dir():
        description = find_latest(path / "checkpoints") or find_latest(path)
        if description is None:
            raise UserError(
                f"{path} has no usable checkpoint (checkpoints/step-*.npz). Pass another run."
            )
        return description
    if not path.exists():
        raise UserError(f"{path} does not exist. Pass {_ACCEPTED_FORMS}.")
    # Reading a pipe or a device might never end.
    if not path.is_file():
        raise UserError(f"{path} is not a regular file. Pass {_ACCEPTED_FORMS}.")
    if path.suffix in FOREIGN_SUFFIXES:
        return CheckpointDescription(path, {})
    if path.suffix == ".keras":
        raise UserError(
            f"{path} is a model that Keras has saved. Load it with keras.saving.load_model, or pass"
            f" {_ACCEPTED_FORMS}."
        )
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not a checkpoint, or is truncated. Pass {_ACCEPTED_FORMS}.")
    try:
        return CheckpointDescription(path, archive.read_meta(path))
    except DamagedCheckpointError as error:
        raise UserError(f"{error}. Pass {_ACCEPTED_FORMS}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Pass a readable file.") from None


def find_latest(
    directory: pathlib.Path, check: Check | None = None
) -> CheckpointDescription | None:
    """Returns the description of the latest usable checkpoint in a directory, or None.

    Args:
      directory: Need not exist.
      check: Raises ValueError for a description that lacks what the caller needs; such a
        checkpoint is skipped.
    """
    for path in CheckpointFolder(directory, lambda _: None).paths():
        try:
            meta = archive.read_meta(path)
            if check is not None:
                check(meta)
            return CheckpointDescription(path, meta)
        except (DamagedCheckpointError, OSError, ValueError):
            # The store reports and renames the file when the run starts.
            continue
    return None


def check_run(meta: Mapping[str, Any]) -> None:
    """Checks that a description has what a run needs to continue from it.

    Checksums only show that a file was not altered, not that this version can continue from it.

    Raises:
      ValueError: If something is missing or has another form; the message names it.
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
    """Finds checkpoints in a directory without changing it.

    The directory may belong to a run that is still training.
    """

    def __init__(self, directory: pathlib.Path, log: Log):
        """Stores the arguments.

        Args:
          directory: Need not exist.
          log: Receives a line about each unusable checkpoint.
        """
        self.directory = directory
        self._log = log

    def paths(self) -> list[pathlib.Path]:
        """Returns all paths that have the name of a checkpoint, latest first."""
        if not self.directory.is_dir():
            return []
        paths = [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(paths, reverse=True)

    def latest_valid(self) -> CheckpointArchive | None:
        """Returns the latest checkpoint that passes all checks, or None."""
        return self._first_valid(self.paths())

    def best_valid(self) -> CheckpointArchive | None:
        """Returns the valid checkpoint with the highest validation top-1 accuracy.

        Only checkpoints that were saved right after a validation have an accuracy. Of equal ones
        the earliest is returned, and None if there are none.
        """
        scores: dict[pathlib.Path, float] = {}
        for path in reversed(self.paths()):
            top1 = self._try(_read_top1, path)
            if top1 is not None:
                scores[path] = top1
        # Sorting is stable, so equal scores stay in the order of steps.
        return self._first_valid(sorted(scores, key=lambda path: scores[path], reverse=True))

    def _first_valid(self, paths: Sequence[pathlib.Path]) -> CheckpointArchive | None:
        for path in paths:
            checkpoint = self._try(self._read, path)
            if checkpoint is not None:
                return checkpoint
        return None

    def _try(self, read: Callable[[pathlib.Path], _Result], path: pathlib.Path) -> _Result | None:
        """Returns the result of `read`; rejects a file that cannot be used and returns None."""
        try:
            return read(path)
        except FileNotFoundError:
            # A run that is still training has removed the file meanwhile.
            return None
        except (DamagedCheckpointError, OSError) as error:
            self._reject(path, error)
            return None

    def _read(self, path: pathlib.Path) -> CheckpointArchive:
        return archive.read(path)

    def _reject(self, path: pathlib.Path, error: Exception) -> None:
        self._log(f"skipped a checkpoint: {error}")


class _ValidatedFile(NamedTuple):
    """Holds the signature that a valid file had when it was read, and its validation top-1."""

    signature: tuple[int, ...]
    top1: float | None


class CheckpointStore(CheckpointFolder):
    """Writes, finds and removes the checkpoints of the run that rank 0 works on.

    Writing happens in a thread. At most one write is in progress, and an error in the thread is
    raised by the next call of `save` or `wait`. Only valid files count towards `keep`; damaged ones
    are renamed to `step-*.npz.damaged`.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        keep: int,
        *,
        keep_best: bool = False,
        log: Log = lambda _: None,
        restart: str = "",
    ):
        """Stores the arguments; the directory is created at the first write.

        Args:
          directory: Must not contain other files.
          keep: Number of latest valid checkpoints to keep.
          keep_best: Also keep the checkpoint with the highest validation top-1 (`val_top1`).
          log: Receives a line about each file that is skipped or renamed; called by the thread that
            owns the store.
          restart: How the user continues after an error, for its message; "" for a run of the
            training program, whose directory is the parent of `directory`.
        """
        super().__init__(directory, log)
        self._restart = (
            restart or f"run hybrid-imagenet resume {shlex.quote(str(directory.parent))}"
        )
        self.keep = keep
        self._keep_best = keep_best
        self._validated: dict[pathlib.Path, _ValidatedFile] = {}
        # Messages wait here, because the writing thread must not call `log`.
        self._pending_messages: list[str] = []
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int, arrays: Arrays, meta: Mapping[str, Any]) -> None:
        """Starts writing the checkpoint of a step; the arrays must not change any more.

        Raises:
          UserError: If the previous write failed, naming the directory and the cause.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(step, arrays, meta), name="checkpoint"
        )
        self._thread.start()

    @property
    def writing(self) -> bool:
        """Whether a write is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits until no write is in progress.

        Raises:
          UserError: If the last write failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._log_pending_messages()
        if self._error is None:
            return
        error = self._error
        self._error = None
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        earlier = "No checkpoint has been written yet."
        if self.paths():
            earlier = "Earlier checkpoints are intact."
        raise UserError(
            f"A checkpoint could not be written to {self.directory}: {reason}. {earlier} Free space"
            f" or allow access, then {self._restart}."
        )

    def latest_valid(self) -> CheckpointArchive | None:
        """Returns the latest valid checkpoint, or None; renames later ones that are damaged."""
        checkpoint = super().latest_valid()
        self._log_pending_messages()
        return checkpoint

    def damaged_paths(self) -> list[pathlib.Path]:
        """Returns the damaged files that this session and earlier ones have renamed."""
        return sorted(self.directory.glob(f"step-*.npz{_DAMAGED_SUFFIX}*"))

    def _log_pending_messages(self) -> None:
        while self._pending_messages:
            self._log(self._pending_messages.pop(0))

    def _write(self, step: int, arrays: Arrays, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint, then removes old ones; runs in the writing thread."""
        try:
            # Without its parents: if the run directory was deleted, it must not appear again.
            self.directory.mkdir(exist_ok=True)
            for leftover in self.directory.glob(".step-*.tmp"):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            path = self.directory / f"step-{step:09d}.npz"
            if os.path.lexists(path):
                # This renames a damaged file of that name, which would be overwritten otherwise.
                self._is_valid(path)
            archive.write(path, arrays, meta)
            self._validated[path] = _ValidatedFile(_signature(path), meta.get("val_top1"))
            self._remove_old()
        except Exception as error:
            # The next call raises it again, in the training thread.
            self._error = error

    def _remove_old(self) -> None:
        """Removes valid checkpoints that are neither among the latest `keep` nor the best."""
        valid = [path for path in self.paths() if self._is_valid(path)]
        kept = set(valid[: self.keep])
        if self._keep_best:
            scores: dict[pathlib.Path, float] = {}
            # In the order of steps, so that `max` returns the earliest of equal scores.
            for path in reversed(valid):
                top1 = self._validated[path].top1
                if top1 is not None:
                    scores[path] = top1
            if scores:
                kept.add(max(scores, key=lambda path: scores[path]))
        for path in valid:
            if path not in kept:
                path.unlink(missing_ok=True)
                del self._validated[path]

    def _is_valid(self, path: pathlib.Path) -> bool:
        """Returns whether a file is valid; one that has not changed is not read again."""
        return bool(self._try(self._verify, path))

    def _verify(self, path: pathlib.Path) -> bool:
        validated = self._validated.get(path)
        if validated is None or validated.signature != _signature(path):
            self._read(path, keep_arrays=False)
        return True

    def _read(self, path: pathlib.Path, *, keep_arrays: bool = True) -> CheckpointArchive:
        # The signature is taken first: if the file changes meanwhile, it is verified again later.
        signature = _signature(path)
        checkpoint = archive.read(path, keep_arrays=keep_arrays)
        try:
            check_run(checkpoint.meta)
        except ValueError as error:
            raise DamagedCheckpointError(f"{path}: {error}") from None
        step = checkpoint.meta["state"]["step"]
        if step != step_of(path):
            raise DamagedCheckpointError(f"{path}: it holds step {step}")
        self._validated[path] = _ValidatedFile(signature, checkpoint.meta.get("val_top1"))
        return checkpoint

    def _reject(self, path: pathlib.Path, error: Exception) -> None:
        """Renames a damaged file and queues a message.

        A file that could not be read keeps its name, because the fault may be that of the disk.
        """
        if not isinstance(error, DamagedCheckpointError):
            self._pending_messages.append(f"skipped a checkpoint: {error}")
            return
        new_path = path.with_name(path.name + _DAMAGED_SUFFIX)
        number = 1
        while os.path.lexists(new_path):
            number += 1
            new_path = path.with_name(f"{path.name}{_DAMAGED_SUFFIX}-{number}")
        try:
            path.rename(new_path)
        except OSError as rename_error:
            self._pending_messages.append(
                f"skipped a checkpoint: {error}; it cannot be renamed: {rename_error.strerror}"
            )
        else:
            self._pending_messages.append(
                f"renamed a damaged checkpoint to {new_path.name}: {error}"
            )


def step_of(path: pathlib.Path) -> int:
    """Returns the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def _read_top1(path: pathlib.Path) -> float | None:
    """Returns the validation top-1 of a checkpoint, or None if it was not validated."""
    top1 = archive.read_meta(path).get("val_top1")
    return top1 if isinstance(top1, float) else None


def _signature(path: pathlib.Path) -> tuple[int, ...]:
    """Returns values that change when a file is written to or replaced.

    Damage that leaves them equal is found when the file is read.
    """
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
