"""Reads Parquet shards with an image column, as the Hugging Face hub stores image sets, from a
directory or a URL.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hybrid_imagenet.data import listing
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.directories import Directory
from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.data.sources.source import BadRecord, Source, check_directory
from hybrid_imagenet.errors import UserError, import_optional

_FOOTERS = 16  # that are read at the same time
_FOOTER = 64 << 10  # bytes of most, which one request gets
_LONGEST = 1 << 30
_IMAGE = ("image", "img", "jpg")
_LABEL = ("label", "labels", "cls", "fine_label")


def find(request: DatasetRequest) -> SplitSummary:
    """Finds the Parquet files of a split."""
    _find(request.open_directory(), request.split)
    return SplitSummary(f"found in {request.directory}")


def open_split(request: DatasetRequest) -> Source:
    """Opens the Parquet files of a split, at a path or a URL."""
    return ParquetSource(
        request.open_directory(), request.split, request.num_classes, request.memory_bytes
    )


class ParquetSource(Source):
    """Gives random access to rows, by whole row groups: the smallest part of a Parquet file that
    can be read.

    Row groups that were read stay in memory up to `cache_bytes`. An order that mixes a set larger
    than that reads a row group for almost every image: mix a few files at a time
    (`order.shard_order`), or convert such a set with `data prepare`.

    Args:
      directory: holds `train-*.parquet` (or `train.parquet`), itself or in `data/`, or
      `train/*.parquet`.
      split: "train" or "validation".
      num_classes: if the files' metadata does not name the classes.
      cache_bytes: bound on the row groups in memory.

    Raises:
      UserError: without pyarrow, for files that are missing or of several sets, for columns that
        cannot be used, or for files that name other classes.
    """

    def __init__(
        self, directory: Directory, split: str, num_classes: int | None, cache_bytes: int
    ) -> None:
        super().__init__()
        self._directory = directory
        self.reads = directory.reads
        self._files, self.notes = _find(directory, split)
        self.listing = self._files
        self._footers = footers = _footers(directory, self._files)
        self._image, self._label = _columns(directory, self._files, footers)
        rows, first_group = [], [0]
        for footer in footers:
            rows += [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
            first_group.append(first_group[-1] + footer.num_row_groups)
        self._group_starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._first_group = np.array(first_group)
        self.num_examples = int(self._group_starts[-1])
        if not self.num_examples:
            raise UserError(f"{directory.location}: its {split} Parquet files hold no rows")
        self.shard_sizes = np.diff(self._group_starts[self._first_group])
        largest = max(
            f.row_group(number).total_byte_size
            for f in footers
            for number in range(f.num_row_groups)
        )
        self._row_group = functools.lru_cache(max(1, cache_bytes // max(1, largest)))(
            self._read_row_group
        )
        self._reading = [
            threading.Lock() for _ in rows
        ]  # lru_cache does not hold up threads that miss the same
        self.class_names = self._class_names(footers) or listing.numbered_class_names(
            directory.location, num_classes
        )
        self.num_classes = len(self.class_names)

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file of a row and its number there."""
        group = int(np.searchsorted(self._group_starts, index, "right")) - 1
        file = int(np.searchsorted(self._first_group, group, "right")) - 1
        return self._directory.display_name(self._files[file]), int(
            index - self._group_starts[self._first_group[file]]
        )

    def prefetch(self, shards: Sequence[int]) -> None:
        self._directory.prefetch([self._files[number] for number in shards])

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads one row, with its row group."""
        group = int(np.searchsorted(self._group_starts, index, "right")) - 1
        try:
            with self._reading[group]:
                table = self._row_group(group)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                check_directory(self.locate(index)[0])
            raise BadRecord(*self.locate(index), " ".join(str(error).split())[:200]) from None
        row = index - int(self._group_starts[group])
        image, label = table.column(0)[row].as_py(), table.column(1)[row].as_py()
        content = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(content, bytes) or not isinstance(label, int):
            raise BadRecord(*self.locate(index), "holds no image bytes or no label")
        return content, self._checked_label(index, label)

    def _read_row_group(self, group: int) -> Any:
        file = int(np.searchsorted(self._first_group, group, "right")) - 1
        number = group - int(self._first_group[file])
        name, footer = self._files[file], self._footers[file]
        path = self._directory.local_path(name)
        with _package().ParquetFile(
            path, metadata=footer, page_checksum_verification=True
        ) as opened:
            table = opened.read_row_group(number, columns=[self._image, self._label]).select(
                [self._image, self._label]
            )
        if not self._directory.remote:
            self.reads.add(footer.row_group(number).total_byte_size)
        return table

    def _class_names(self, footers: Sequence[Any]) -> tuple[str, ...] | None:
        """Returns the classes that the files name, which must agree; None where none does."""
        names = {
            file: _named(footer, self._label)
            for file, footer in zip(self._files, footers, strict=True)
        }
        told = {file: found for file, found in names.items() if found}
        if not told:
            return None
        first, expected = next(iter(told.items()))
        for file, found in told.items():
            if differs := listing.class_difference(expected, found):
                raise UserError(
                    f"{self._directory.display_name(first)} and {file} name different classes"
                    f" ({differs}):"
                    " write them again with the same list of classes"
                )
        if len(told) < len(names):
            silent = next(file for file in names if file not in told)
            count = f"{len(names) - len(told)} files do not name the classes, the first is {silent}"
            self.notes += (DatasetNote(f"{self._directory.location}: {count}; taken from {first}"),)
        return expected


def _find(directory: Directory, split: str) -> tuple[list[str], tuple[DatasetNote, ...]]:
    """Returns the files of a split by their names, and notes on what is not read.

    Raises:
      UserError: if there are none, if one is missing, or if they are of several sets.
    """
    names, place = (
        [name for name in directory.list_files() if name.endswith(".parquet")],
        directory.location,
    )

    def named(word: str) -> list[str]:
        pattern = re.compile(rf"(data/)?{word}(-\d+-of-\d+[^/]*)?\.parquet$|{word}/")
        return [name for name in names if pattern.match(name)]

    found = listing.files_of_split(place, split, named)
    if not found:
        raise UserError(
            f"--data_dir={place}: holds no {split} Parquet files (names like"
            f" {split}-00000-of-00040.parquet)"
        )
    files = listing.complete_file_set(place, split, found)
    return files, (
        *listing.numbering_gaps(place, files),
        *listing.unassigned_files(place, names, named),
    )


def _columns(directory: Directory, files: Sequence[str], footers: Sequence[Any]) -> tuple[str, str]:
    """Returns the names of the image and the label column.

    Raises:
      UserError: if a file lacks one, has other columns than the first, or labels that are no class
        numbers.
    """
    import pyarrow

    found: list[tuple[str, str]] = []
    for file, footer in zip(files, footers, strict=True):
        place, schema = directory.display_name(file), footer.schema.to_arrow_schema()
        image, label = (
            next((name for name in known if name in schema.names), None)
            for known in (_IMAGE, _LABEL)
        )
        if image is None or label is None:
            raise UserError(
                f"{place}: needs an image column ({', '.join(_IMAGE)}) and a label column"
                f" ({', '.join(_LABEL)}), has {', '.join(schema.names) or 'none'}"
            )
        found.append((image, label))
        kind = schema.field(label).type
        if not pyarrow.types.is_integer(kind):
            raise UserError(
                f"{place}: column {label} holds {kind}, not class numbers: write one number into"
                " each row"
            )
        if not _holds_one_image(schema.field(image).type):
            raise UserError(
                f"{place}: column {image} holds {schema.field(image).type} instead of the bytes of"
                " one encoded image: write one image into each row"
            )
        if found[-1] != found[0]:
            raise UserError(
                f"{place}: its columns are {image} and {label}, those of {files[0]}"
                f" {' and '.join(found[0])}: give all files the same"
            )
    return found[0]


def _holds_one_image(kind: Any) -> bool:
    """Returns whether a column type is bytes, or the hub's structure that has them in `bytes`."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_one_image(kind.field(place).type)
    return (
        pyarrow.types.is_binary(kind)
        or pyarrow.types.is_large_binary(kind)
        or pyarrow.types.is_null(kind)
    )


def _footers(directory: Directory, names: Sequence[str]) -> list[Any]:
    """Returns the metadata of files, without copies of those at a URL."""
    parquet = _package()
    with _explained(directory, names[0]):
        directory.look_up_sizes(names)

    def footer(name: str) -> Any:
        with _explained(directory, name):
            tail = directory.read_tail(name, _FOOTER)
            length = (
                int.from_bytes(tail[-8:-4], "little") + 8
            )  # of the metadata, which stand before it
            if len(tail) < length < _LONGEST:
                tail = directory.read_tail(name, length)
            return parquet.read_metadata(io.BytesIO(tail))

    with concurrent.futures.ThreadPoolExecutor(min(_FOOTERS, len(names))) as pool:
        return list(pool.map(footer, names))


@contextlib.contextmanager
def _explained(directory: Directory, name: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{directory.display_name(name)}: is not a readable Parquet file ({reason})"
        ) from None


def _package() -> Any:
    return import_optional(
        "pyarrow.parquet", "--dataset=parquet: needs pyarrow (pip install pyarrow)"
    )


def _named(footer: Any, label: str) -> tuple[str, ...] | None:
    """Returns the names that the Hugging Face metadata of a file gives its label column."""
    text = (footer.metadata or {}).get(b"huggingface")
    try:
        names = json.loads(text)["info"]["features"][label]["names"] if text else None
    except (ValueError, KeyError, TypeError):
        return None
    return tuple(map(str, names.values() if isinstance(names, dict) else names)) if names else None
