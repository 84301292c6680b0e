"""Writes and reads checkpoint files: one archive each, checksummed, replaced atomically, read
without pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import stat
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hybrid_imagenet import files

FORMAT = 1
_META, _ARRAY, _SUFFIX = "meta", "array/", ".npy"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# System errors that damaged bytes, or something that is not a file, cause; all others are faults of
# the disk.
_DAMAGE = (None, errno.EINVAL, errno.ENXIO, errno.ELOOP)
Arrays = Mapping[str, np.ndarray]


class DamagedCheckpointError(Exception):
    """A checkpoint file that is cut short, altered or of another program; the message says what is
    wrong.
    """


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Arrays by name, and a JSON-ready description of the run that they belong to."""

    path: pathlib.Path
    arrays: Arrays
    meta: dict[str, Any]


def write(path: pathlib.Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint so that `path` holds either all of it or what it held before.

    The file is an uncompressed NumPy archive. Its members carry CRC-32 checksums, and one of them
    lists the names of the others, which have none.

    Raises:
      OSError: if the disk is full or not writable; the temporary file is removed.
    """
    text = json.dumps({"format": FORMAT, "arrays": sorted(arrays), **meta}).encode()
    members = {_META: np.frombuffer(text, np.uint8)} | {
        f"{_ARRAY}{k}": v for k, v in arrays.items()
    }
    with files.atomic_replace(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **members)  # type: ignore[arg-type]


def read(path: pathlib.Path, *, arrays: bool = True) -> Checkpoint:
    """Reads and verifies a checkpoint; without `arrays` it verifies them, but does not keep them.

    Raises:
      DamagedCheckpointError: if it is not complete and intact.
      OSError: if it cannot be opened or read.
    """
    with _opened(path) as (archive, size):
        meta: dict[str, Any] | None = None
        names: list[str] = []
        kept = {}
        for info in archive.infolist():
            name, array = info.filename.removesuffix(_SUFFIX), _array(_content(archive, info, size))
            if info.filename == _META + _SUFFIX:
                meta = _description(array)
                continue
            if not (name.startswith(_ARRAY) and info.filename.endswith(_SUFFIX)):
                raise DamagedCheckpointError(
                    f"it has an unexpected member ({info.filename[:80]!r})"
                )
            names.append(name.removeprefix(_ARRAY))
            if arrays:
                kept[names[-1]] = array
        if meta is None or meta.pop("arrays") != sorted(names):
            raise DamagedCheckpointError("its table of contents does not match its content")
        return Checkpoint(path, kept, meta)


def read_meta(path: pathlib.Path) -> dict[str, Any]:
    """Reads the description alone, without a look at the arrays; raises as `read` does."""
    with _opened(path) as (archive, size):
        return _description(_array(_content(archive, archive.getinfo(_META + _SUFFIX), size)))


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[tuple[zipfile.ZipFile, int]]:
    """Yields the archive and its size in bytes; errors that its bytes cause inside become
    DamagedCheckpointError.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK
        )  # a FIFO would keep us waiting for a writer
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedCheckpointError("not a regular file")
            file = stack.enter_context(os.fdopen(descriptor, "rb", closefd=False))
            yield stack.enter_context(zipfile.ZipFile(file)), status.st_size
    except (
        MemoryError
    ):  # of the machine: sizes are compared with the file's before anything is reserved
        raise
    except (
        Exception
    ) as error:  # zipfile, json and numpy raise nearly anything when their input is damaged
        if isinstance(error, OSError) and error.errno not in _DAMAGE:
            raise
        raise DamagedCheckpointError(
            f"{path}: {' '.join(str(error).split()) or type(error).__name__}"
        ) from None


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, size: int) -> bytes:
    """Returns the bytes of a member, whose checksum is right."""
    if info.compress_type != zipfile.ZIP_STORED or not info.file_size == info.compress_size <= size:
        raise DamagedCheckpointError("its directory of members is damaged")
    return archive.read(info)


def _array(content: bytes) -> np.ndarray:
    """Returns the array of a member; no more memory is taken than the member has bytes, whatever
    its header says.
    """
    file = io.BytesIO(content)
    try:
        shape, columns_first, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
    except (
        Exception
    ) as error:  # a MemoryError is the parser's here, for a header that is nested too deeply
        raise DamagedCheckpointError(
            f"an array has a damaged header ({type(error).__name__})"
        ) from None
    if dtype.hasobject:
        raise DamagedCheckpointError("an array holds objects, which are not read")
    start = file.tell()
    array = np.ndarray(shape, dtype, content, start, order="F" if columns_first else "C")
    if start + array.nbytes != len(content):
        raise DamagedCheckpointError(f"an array of shape {shape} has {len(content) - start} bytes")
    return array.copy()


def _description(array: np.ndarray) -> dict[str, Any]:
    meta = json.loads(array.astype(np.uint8, casting="equiv").tobytes())
    if not isinstance(meta, dict) or not isinstance(meta.get("format"), int):
        raise DamagedCheckpointError("its description is not in the form of this package")
    if meta["format"] != FORMAT:
        raise DamagedCheckpointError(f"format {meta['format']}, this version reads {FORMAT}")
    return meta
