"""Writes and reads checkpoint files.

A checkpoint is one NumPy archive (.npz). It is checksummed, it replaces an earlier file atomically,
and it is read without pickle, so that a file of unknown origin cannot run code.
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

# Its import makes its types, such as bfloat16, known to NumPy by their names.
import ml_dtypes  # noqa: F401
import numpy as np

from hybrid_imagenet import files
from hybrid_imagenet.errors import LOAD_WEIGHTS_WITH_NUMPY, UserError, check_format

# Increase it whenever the content changes: arrays, the description or the state of a run. Files
# with another number are rejected, so no code needs to know how they differ.
FORMAT = 3
_META = "meta"
_ARRAY_PREFIX = "array/"
_SUFFIX = ".npy"
_MAX_SHOWN_NAME = 80
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Damaged bytes, or a path that is not a regular file, cause these system errors (None: an OSError
# without a number). All others are faults of the disk.
_DAMAGE_ERRNOS = (None, errno.EINVAL, errno.ENXIO, errno.ELOOP)
Arrays = Mapping[str, np.ndarray]


class DamagedCheckpointError(Exception):
    """Reports a checkpoint file that is truncated, altered or written by another program.

    The message names the file and what is wrong with it.
    """


@dataclasses.dataclass(frozen=True)
class CheckpointArchive:
    """Holds the content of a checkpoint file.

    Attributes:
      path: The file.
      arrays: Arrays by name; empty if they were only verified.
      meta: JSON-ready description of the run that wrote the file.
    """

    path: pathlib.Path
    arrays: Arrays
    meta: dict[str, Any]


def write(path: pathlib.Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint atomically.

    If the write fails, `path` keeps its earlier content. The file is an uncompressed NumPy archive.
    Its members carry CRC-32 checksums, and the description lists the names of all arrays, because
    checksums do not cover names. It also has the types that NumPy does not store, such as bfloat16.

    Raises:
      OSError: If the disk is full or not writable; the temporary file is removed.
    """
    types = {name: array.dtype.name for name, array in arrays.items() if array.dtype.kind == "V"}
    contents = {"format": FORMAT, "arrays": sorted(arrays), "types": types}
    text = json.dumps({**contents, **meta}).encode()
    members = {_META: np.frombuffer(text, np.uint8)}
    for name, array in arrays.items():
        members[f"{_ARRAY_PREFIX}{name}"] = array
    with files.atomic_replace(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **members)  # type: ignore[arg-type]


def read(path: pathlib.Path, *, keep_arrays: bool = True) -> CheckpointArchive:
    """Reads and verifies a checkpoint.

    Args:
      path: The file.
      keep_arrays: False verifies the arrays, but does not return them.

    Raises:
      DamagedCheckpointError: If the file is not complete and intact.
      UserError: If another version of this package has saved it.
      OSError: If it cannot be opened or read.
    """
    with _open_archive(path) as (archive, file_bytes):
        meta: dict[str, Any] | None = None
        names: list[str] = []
        arrays = {}
        for info in archive.infolist():
            array = _parse_array(_read_member(archive, info, file_bytes))
            if info.filename == _META + _SUFFIX:
                meta = _parse_meta(array, path)
                continue
            is_array = info.filename.startswith(_ARRAY_PREFIX) and info.filename.endswith(_SUFFIX)
            if not is_array:
                raise DamagedCheckpointError(
                    f"it has an unexpected member ({info.filename[:_MAX_SHOWN_NAME]!r})"
                )
            name = info.filename.removesuffix(_SUFFIX).removeprefix(_ARRAY_PREFIX)
            names.append(name)
            if keep_arrays:
                arrays[name] = array
        if meta is None or meta.pop("arrays") != sorted(names):
            raise DamagedCheckpointError("its table of contents does not match its content")
        types = meta.pop("types")
        if keep_arrays:
            arrays |= {name: arrays[name].view(np.dtype(types[name])) for name in types}
        return CheckpointArchive(path, arrays, meta)


def read_meta(path: pathlib.Path) -> dict[str, Any]:
    """Reads only the description of a checkpoint; the arrays are not verified.

    Raises:
      DamagedCheckpointError: If the description is not complete and intact.
      UserError: If another version of this package has saved it.
      OSError: If the file cannot be opened or read.
    """
    with _open_archive(path) as (archive, file_bytes):
        info = archive.getinfo(_META + _SUFFIX)
        return _parse_meta(_parse_array(_read_member(archive, info, file_bytes)), path)


@contextlib.contextmanager
def _open_archive(path: pathlib.Path) -> Iterator[tuple[zipfile.ZipFile, int]]:
    """Yields the archive and the size of its file in bytes.

    Inside, errors that come from damaged bytes are turned into DamagedCheckpointError.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedCheckpointError("not a regular file")
            file = stack.enter_context(os.fdopen(descriptor, "rb", closefd=False))
            yield stack.enter_context(zipfile.ZipFile(file)), status.st_size
    except UserError:
        raise
    except MemoryError:
        # Sizes are compared with the size of the file before memory is allocated, so a MemoryError
        # means that the machine has too little memory, not that the file is damaged.
        raise
    except Exception as error:
        # zipfile, json and numpy raise exceptions of many types for damaged input.
        if isinstance(error, OSError) and error.errno not in _DAMAGE_ERRNOS:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DamagedCheckpointError(f"{path}: {reason}") from None


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file_bytes: int) -> bytes:
    """Returns the content of a member after its checksum was verified."""
    is_stored = info.compress_type == zipfile.ZIP_STORED
    if not is_stored or not info.file_size == info.compress_size <= file_bytes:
        raise DamagedCheckpointError("its directory of members is damaged")
    return archive.read(info)


def _parse_array(content: bytes) -> np.ndarray:
    """Returns the array of a member.

    The array is a view of the content before it is copied, so a damaged header cannot make NumPy
    allocate more memory than the member has bytes.
    """
    file = io.BytesIO(content)
    try:
        read_header = _HEADER_READERS[np.lib.format.read_magic(file)]
        shape, is_fortran_order, dtype = read_header(file)
    except Exception as error:
        # This includes a MemoryError, which Python's parser raises for a header that is nested too
        # deeply.
        raise DamagedCheckpointError(
            f"an array has a damaged header ({type(error).__name__})"
        ) from None
    if dtype.hasobject:
        raise DamagedCheckpointError("an array holds Python objects, which are not read")
    start = file.tell()
    array = np.ndarray(shape, dtype, content, start, order="F" if is_fortran_order else "C")
    if start + array.nbytes != len(content):
        raise DamagedCheckpointError(f"an array of shape {shape} has {len(content) - start} bytes")
    return array.copy()


def _parse_meta(array: np.ndarray, path: pathlib.Path) -> dict[str, Any]:
    meta = json.loads(array.astype(np.uint8, casting="equiv").tobytes())
    if not isinstance(meta, dict):
        raise DamagedCheckpointError("its description was not written by this package")
    check_format(path, meta.get("format"), FORMAT, LOAD_WEIGHTS_WITH_NUMPY)
    return meta
