"""Checkpoints: one file each, checksummed, replaced atomically, read without pickle."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import re
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hybrid_imagenet.errors import UserError

FORMAT = 1
_META = "meta"
_NAME = re.compile(r"step-(\d{9})\.npz")
Arrays = Mapping[str, np.ndarray]


class DamagedCheckpointError(Exception):
    """A checkpoint file that is cut short, altered or not one of ours; the message says what is wrong."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Arrays by name, and a JSON-ready description of the run that they belong to."""

    path: pathlib.Path
    arrays: Arrays
    meta: dict[str, Any]


def write(path: pathlib.Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint so that `path` holds either all of it or what it held before.

    The file is an uncompressed NumPy archive. Its members carry CRC-32 checksums, and one of them lists the names of
    the others, which have none. It is written under a temporary name, flushed to the disk and renamed; the directory
    entry is flushed too.

    Raises:
      OSError: if the disk is full or not writable; the temporary file is removed.
    """
    text = json.dumps({"format": FORMAT, "arrays": sorted(arrays), **meta}).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **{_META: np.frombuffer(text, np.uint8)}, **{f"array/{k}": v for k, v in arrays.items()})  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(path: pathlib.Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises:
      DamagedCheckpointError: if it is not complete and intact.
      OSError: if it cannot be opened.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            content = {name: archive[name] for name in archive.files}
        meta = json.loads(bytes(content.pop(_META)))
        arrays = {name.removeprefix("array/"): value for name, value in content.items()}
        if meta.pop("arrays") != sorted(arrays) or not all(isinstance(a, np.ndarray) for a in arrays.values()):
            raise DamagedCheckpointError(f"{path}: its table of contents does not match its content")
        if meta["format"] != FORMAT:
            raise DamagedCheckpointError(f"{path}: format {meta['format']}, this version reads {FORMAT}")
    except (
        zipfile.BadZipFile,
        zlib.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        NotImplementedError,
    ) as error:
        raise DamagedCheckpointError(f"{path}: {' '.join(str(error).split()) or type(error).__name__}") from None
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # a damaged table of contents leads to impossible places
            raise
        raise DamagedCheckpointError(f"{path}: {error}") from None
    return Checkpoint(path, arrays, meta)


class CheckpointStore:
    """The checkpoints of one run, in one directory; used by rank 0.

    Writing happens in a thread; at most one write is under way, and an error of the thread is raised by the next call.
    """

    def __init__(self, directory: pathlib.Path, keep: int):
        """Keeps the newest `keep` checkpoints of `directory`, which is created at the first write."""
        self.directory = directory
        self.keep = keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def paths(self) -> list[pathlib.Path]:
        """The checkpoint files, newest first."""
        if not self.directory.is_dir():
            return []
        return sorted((p for p in self.directory.iterdir() if _NAME.fullmatch(p.name)), reverse=True)

    def save(self, step: int, arrays: Arrays, meta: Mapping[str, Any], *, wait: bool = False) -> None:
        """Starts writing the checkpoint of a step; the arrays must not change any more.

        Raises:
          UserError: if this or the previous write failed, naming the directory and the cause.
        """
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, arrays, meta), name="checkpoint")
        self._thread.start()
        if wait:
            self.wait()

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
        if self._error is not None:
            error, self._error = self._error, None
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise UserError(
                f"cannot write a checkpoint to {self.directory}: {reason}; earlier checkpoints are intact, "
                "make room or access and start again with --resume"
            )

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, to which the run must not go back."""
        for path in self.paths():
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink(missing_ok=True)

    def newest_good(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be read; `report` is told of each damaged one that is passed over."""
        for checkpoint in self._readable(report):
            return checkpoint
        return None

    def _readable(self, report: Callable[[str], None]) -> Iterator[Checkpoint]:
        for path in self.paths():
            try:
                yield read(path)
            except (DamagedCheckpointError, OSError) as error:
                report(f"damaged checkpoint passed over: {error}")

    def _write(self, step: int, arrays: Arrays, meta: Mapping[str, Any]) -> None:
        try:
            self.directory.mkdir(exist_ok=True)  # not its parents: a run directory that was deleted stays so
            for leftover in self.directory.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            write(self.directory / f"step-{step:09d}.npz", arrays, meta)
            for old in self.paths()[self.keep :]:
                old.unlink(missing_ok=True)
        except Exception as error:  # raised again by the next call, in the training thread
            self._error = error
