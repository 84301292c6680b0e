"""Finds the samples of a WebDataset tar file: where each image lies, and its label."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from hybrid_imagenet import files

IMAGES = ("jpg", "jpeg", "png", "bmp", "gif")
_LABELS = ("cls", "json")
_VERSION = 3  # of the rules by which samples are found
_UNKNOWN = -1
_COLUMNS = ("begin", "offset", "length", "label")
_LONGEST_LABEL = 1 << 20  # bytes of a label's file
_LARGEST_LABEL = 2**31 - 1
_Row = tuple[int, int, int, int]  # begin, offset, length and label of a sample


@dataclasses.dataclass(frozen=True)
class TarIndex:
    """Locates the samples of one tar file, in its order.

    Attributes:
      begin: int64 [n]; the byte at which the header of each sample's first file begins.
      offset, length: int64 [n]; first byte and bytes of each image; offset -1 for a sample without one.
      label: int64 [n]; -1 for a sample without one.
    """

    begin: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]


def load(path: Path, stored: Path | None) -> TarIndex:
    """Returns the index of a tar file from where it is stored, else from the file, and stores it.

    Args:
      path: the file.
      stored: where the index is kept; None for the user's cache, until the file changes.

    Raises:
      OSError, ValueError: as `scan`.
    """
    stored = stored or files.cached_index("tar", _VERSION, of=[path])
    return files.remembered(stored, _read, lambda: scan(path), _write)


def _read(stored: Path) -> TarIndex:
    with np.load(stored) as found:
        if found["version"] != _VERSION:
            raise ValueError("found by other rules")
        return TarIndex(**{name: found[name] for name in _COLUMNS})


def _write(stored: Path, index: TarIndex) -> None:
    with stored.open("wb") as file:
        np.savez(file, allow_pickle=False, version=_VERSION, **{name: getattr(index, name) for name in _COLUMNS})


def scan(path: Path) -> TarIndex:
    """Reads the headers of a tar file, and the files with labels.

    A sample is what the files of one key have, which follow one another; the key is a path up to the first dot of its
    last part, and what follows is the extension (the WebDataset format). Its image is the file whose whole extension is
    one of `IMAGES`: `1.depth.png` is not one. Its label is the number in `.cls`, or `label` or `cls` in `.json`.

    Raises:
      OSError: if the file cannot be read.
      ValueError: for a file that is cut, damaged or two that were joined; for a sample with two images, or with two
        labels that differ.
    """
    rows: list[_Row] = []
    end, key = 0, None
    used: dict[str, str] = {}
    with path.open("rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    end = member.offset_data + member.size
                    found, extension = _divided(member.name)
                    if not (member.isfile() and found and extension):
                        continue
                    if found != key:
                        rows.append((member.offset, _UNKNOWN, 0, _UNKNOWN))
                        key, used = found, {}
                    rows[-1] = _with(rows[-1], file, member, extension, used)
        except tarfile.TarError as error:
            raise ValueError(f"offset {end}: {error}; restore the file") from None
        _check_end(file, -(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
    columns = np.array(rows, np.int64).reshape(-1, len(_COLUMNS)).T.copy()
    return TarIndex(**dict(zip(_COLUMNS, columns, strict=True)))


def _check_end(file: BinaryIO, place: int) -> None:
    """Raises ValueError unless zeros follow the last file that was found, which may be that before a damaged header."""
    file.seek(place)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise ValueError(f"offset {place}: the file ends early; restore it")
    if any(block):
        raise ValueError(f"offset {place}: the header of a file is damaged; restore the file")
    while block := file.read(tarfile.RECORDSIZE):
        if any(block):
            place = file.tell() - len(block.lstrip(b"\0"))
            raise ValueError(
                f"offset {place}: more follows the end of the archive, as if two were joined: give each its own"
            )


def _divided(name: str) -> tuple[str, str]:
    """Returns the key of a file and its whole extension; no key for a file that belongs to no sample."""
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}/{stem}" if stem and not base.startswith("__") else "", extension.lower()


def _with(row: _Row, file: BinaryIO, member: tarfile.TarInfo, extension: str, used: dict[str, str]) -> _Row:
    """Returns the row of a sample with one of its files added; `used` names its image and its label so far."""
    begin, offset, length, label = row
    if extension in IMAGES:
        _only(used, "image", member.name)
        return begin, member.offset_data, member.size, label
    if extension in _LABELS and member.size <= _LONGEST_LABEL:
        position = file.tell()
        file.seek(member.offset_data)
        found = _labels(file.read(member.size), extension)
        file.seek(position)
        for value in found - {label}:
            _only(used, "label", member.name)
            label = value
    return begin, offset, length, label


def _only(used: dict[str, str], what: str, name: str) -> None:
    """Notes the file of a sample's image or label; raises ValueError if it has another one."""
    if what in used:
        raise ValueError(
            f"a sample has two {what}s, {used[what]} and {name}: leave one in each sample, or give the other "
            f"another extension (such as second.{name.rpartition('.')[2]})"
        )
    used[what] = name


def _labels(content: bytes, extension: str) -> set[int]:
    """Returns the class numbers in a file of a sample: none, one, or two that contradict each other."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return set()
    values = [value]
    if extension == "json":
        values = [value.get("label"), value.get("cls")] if isinstance(value, dict) else []
    return {number for number in values if type(number) is int and 0 <= number <= _LARGEST_LABEL}
