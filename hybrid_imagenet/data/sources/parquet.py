"""Reads Parquet files with an image column, from a directory or a URL.

The Hugging Face hub stores image datasets in this form.
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
import numpy.typing as npt

from hybrid_imagenet.data import listing
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.directories import Directory
from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.data.sources.source import BadRecord, Source, raise_if_file_may_be_intact
from hybrid_imagenet.errors import UserError, import_optional

_FOOTER_THREADS = 16
# Most footers are shorter than this, so one request to a server is enough for them.
_FIRST_READ_BYTES = 64 << 10
# A longer footer is damage, and reading it could fill the memory.
_MAX_FOOTER_BYTES = 1 << 30
# The end of a Parquet file: length of the metadata (uint32, little-endian) and the magic "PAR1".
_FOOTER_END_BYTES = 8
_IMAGE_COLUMNS = ("image", "img", "jpg")
_LABEL_COLUMNS = ("label", "labels", "cls", "fine_label")
_MAX_REASON_CHARACTERS = 200


def probe_split(request: DatasetRequest) -> SplitSummary:
    """Finds the Parquet files of a split."""
    _find_files(request.open_directory(), request.split)
    return SplitSummary(f"found in {request.directory}")


def open_split(request: DatasetRequest) -> Source:
    """Opens the Parquet files of a split, at a path or a URL."""
    return ParquetSource(
        request.open_directory(), request.split, request.num_classes, request.memory_bytes
    )


class ParquetSource(Source):
    """Gives random access to rows.

    A row group is the smallest part of a Parquet file that can be read. Row groups stay in memory
    up to `cache_bytes`. If an order shuffles a dataset that is larger than that, almost every image
    costs a row group: mix a few files at a time (`order.shard_order`), or convert the dataset with
    `data prepare`.

    Args:
      directory: Contains `train-*.parquet` or `train.parquet`, itself or in `data/`, or
        `train/*.parquet`.
      split: "train" or "validation".
      num_classes: Number of classes, if the metadata of the files does not name them.
      cache_bytes: Maximum size of the row groups in memory.

    Raises:
      UserError: If pyarrow is not installed, if files are missing or of several sets, if their
        columns cannot be used, or if they name different classes.
    """

    def __init__(
        self, directory: Directory, split: str, num_classes: int | None, cache_bytes: int
    ) -> None:
        super().__init__()
        self._directory = directory
        self.reads = directory.reads
        self._files, self.notes = _find_files(directory, split)
        self.file_names = self._files
        self._footers = _read_footers(directory, self._files)
        self._image_column, self._label_column = _find_columns(
            directory, self._files, self._footers
        )
        self._groups = _RowGroups(self._footers)
        self.num_examples = int(self._groups.first_row[-1])
        if not self.num_examples:
            raise UserError(
                f"The {split} Parquet files in {directory.location} hold no rows. Restore them, or"
                " correct --data_dir."
            )
        self.shard_sizes = self._groups.rows_per_file()
        num_cached_groups = max(1, cache_bytes // max(1, self._groups.max_bytes))
        self._read_group_cached = functools.lru_cache(num_cached_groups)(self._read_group)
        # lru_cache would let several threads read the same row group at the same time.
        self._group_locks = [threading.Lock() for _ in range(self._groups.count)]
        self.class_names = self._stored_class_names() or listing.numbered_class_names(
            directory.location, num_classes
        )
        self.num_classes = len(self.class_names)

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file of a row and the number of the row in it."""
        file = self._groups.file_of(self._groups.group_of(index))
        first_row = self._groups.first_row[self._groups.first_group[file]]
        return self._directory.display_name(self._files[file]), int(index - first_row)

    def prefetch(self, shards: Sequence[int]) -> None:
        self._directory.prefetch([self._files[number] for number in shards])

    def stored_labels(self) -> npt.NDArray[np.int64] | None:
        """Returns the label column, which is read without the images; None for files at a URL."""
        if self._directory.remote:
            return None
        labels = []
        for name, footer in zip(self._files, self._footers, strict=True):
            path = self._directory.local_path(name)
            try:
                with _import_parquet().ParquetFile(path, metadata=footer) as parquet_file:
                    column = parquet_file.read(columns=[self._label_column]).column(0)
            # pyarrow raises subclasses of ValueError for damaged files.
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())[:_MAX_REASON_CHARACTERS]
                raise UserError(
                    f"The labels in {path} cannot be read ({reason}). Restore the file."
                ) from None
            # An unsigned type cannot hold -1, so convert first. A number that int64 cannot hold
            # becomes negative, and `read_one` reports its row.
            labels.append(column.cast("int64", safe=False).fill_null(-1).to_numpy())
        return np.concatenate(labels)

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads one row, with its row group."""
        group = self._groups.group_of(index)
        try:
            with self._group_locks[group]:
                table = self._read_group_cached(group)
        # pyarrow raises subclasses of ValueError for damaged files.
        except (OSError, ValueError) as error:
            file, row = self.locate(index)
            if isinstance(error, OSError):
                raise_if_file_may_be_intact(file, error)
            reason = " ".join(str(error).split())[:_MAX_REASON_CHARACTERS]
            raise BadRecord(file, row, reason) from None
        row_in_group = index - int(self._groups.first_row[group])
        image = table.column(0)[row_in_group].as_py()
        label = table.column(1)[row_in_group].as_py()
        content = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(content, bytes) or not isinstance(label, int):
            raise BadRecord(*self.locate(index), "the row has no image bytes or no label")
        return content, self._validate_label(index, label)

    def _read_group(self, group: int) -> Any:
        """Returns the image and label columns of a row group, in this order."""
        file = self._groups.file_of(group)
        group_in_file = group - int(self._groups.first_group[file])
        footer = self._footers[file]
        path = self._directory.local_path(self._files[file])
        columns = [self._image_column, self._label_column]
        with _import_parquet().ParquetFile(
            path, metadata=footer, page_checksum_verification=True
        ) as parquet_file:
            # read_row_group returns columns in the order of the file.
            table = parquet_file.read_row_group(group_in_file, columns=columns).select(columns)
        # A remote directory counts bytes itself, when it copies the file.
        if not self._directory.remote:
            self.reads.add(footer.row_group(group_in_file).total_byte_size)
        return table

    def _stored_class_names(self) -> tuple[str, ...] | None:
        """Returns the class names in the metadata, or None if no file has them.

        Raises:
          UserError: If two files name different classes.
        """
        class_names: dict[str, tuple[str, ...]] = {}
        files_without_names = []
        for file, footer in zip(self._files, self._footers, strict=True):
            names = _class_names_in_metadata(footer, self._label_column)
            if names:
                class_names[file] = names
            else:
                files_without_names.append(file)
        if not class_names:
            return None
        first_file = next(iter(class_names))
        expected = class_names[first_file]
        for file, names in class_names.items():
            difference = listing.class_difference(expected, names)
            if difference:
                raise UserError(
                    f"{self._directory.display_name(first_file)} and {file} name different classes"
                    f" ({difference}). Write them again with the same list of classes."
                )
        if files_without_names:
            text = (
                f"{len(files_without_names)} files do not name the classes, the first is"
                f" {files_without_names[0]}; taken from {first_file}"
            )
            self.notes += (DatasetNote(f"{self._directory.location}: {text}"),)
        return expected


class _RowGroups:
    """Finds the row group of a row and the file of a row group.

    Rows and row groups are numbered over all files.

    Args:
      footers: The metadata of each file.

    Attributes:
      count: Number of row groups.
      first_row: Number of the first row of each row group, and the number of rows, int64
        [count + 1].
      first_group: Number of the first row group of each file, and `count`, int64 [num_files + 1].
      max_bytes: Size of the largest row group in memory.
    """

    def __init__(self, footers: Sequence[Any]) -> None:
        rows: list[int] = []
        first_group = [0]
        self.max_bytes = 0
        for footer in footers:
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                rows.append(group.num_rows)
                self.max_bytes = max(self.max_bytes, group.total_byte_size)
            first_group.append(len(rows))
        self.count = len(rows)
        self.first_row = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self.first_group = np.array(first_group)

    def group_of(self, row: int) -> int:
        return int(np.searchsorted(self.first_row, row, "right")) - 1

    def file_of(self, group: int) -> int:
        return int(np.searchsorted(self.first_group, group, "right")) - 1

    def rows_per_file(self) -> npt.NDArray[np.int64]:
        return np.diff(self.first_row[self.first_group])


def _find_files(directory: Directory, split: str) -> tuple[list[str], tuple[DatasetNote, ...]]:
    """Finds the files of a split by their names.

    Returns:
      (files, notes): names in order, and notes on files that are not read.

    Raises:
      UserError: If there are no files, if one is missing, or if they are of several sets.
    """
    location = directory.location
    names = [name for name in directory.list_files() if name.endswith(".parquet")]

    def files_by_split_name(split_name: str) -> list[str]:
        pattern = re.compile(rf"(data/)?{split_name}(-\d+-of-\d+[^/]*)?\.parquet$|{split_name}/")
        return [name for name in names if pattern.match(name)]

    split_files = listing.files_of_split(location, split, files_by_split_name)
    if not split_files:
        raise UserError(
            f"--data_dir={location} holds no {split} Parquet files. Their names must be like"
            f" {split}-00000-of-00040.parquet."
        )
    files = listing.complete_file_set(location, split, split_files)
    notes = (
        *listing.numbering_gaps(location, files),
        *listing.unassigned_files(location, names, files_by_split_name),
    )
    return files, notes


def _find_columns(
    directory: Directory, files: Sequence[str], footers: Sequence[Any]
) -> tuple[str, str]:
    """Returns the names of the image and label columns, the same in all files.

    Raises:
      UserError: If a file lacks one of the two, if its columns have other names than those of the
        first file, or if they do not hold one image and one class number per row.
    """
    import pyarrow

    columns: list[tuple[str, str]] = []
    for file, footer in zip(files, footers, strict=True):
        path = directory.display_name(file)
        schema = footer.schema.to_arrow_schema()
        image = next((name for name in _IMAGE_COLUMNS if name in schema.names), None)
        label = next((name for name in _LABEL_COLUMNS if name in schema.names), None)
        if image is None or label is None:
            raise UserError(
                f"{path} needs an image column ({', '.join(_IMAGE_COLUMNS)}) and a label column"
                f" ({', '.join(_LABEL_COLUMNS)}), but has {', '.join(schema.names) or 'none'}."
                " Rename the columns."
            )
        label_type = schema.field(label).type
        if not pyarrow.types.is_integer(label_type):
            raise UserError(
                f"Column {label} of {path} holds {label_type}, not class numbers. Write one number"
                " per row."
            )
        image_type = schema.field(image).type
        if not _holds_one_image(image_type):
            raise UserError(
                f"Column {image} of {path} holds {image_type} instead of the bytes of one encoded"
                " image. Write one image per row."
            )
        columns.append((image, label))
        if columns[-1] != columns[0]:
            raise UserError(
                f"The columns of {path} are {image} and {label}, but those of {files[0]} are"
                f" {' and '.join(columns[0])}. Use the same columns in all files."
            )
    return columns[0]


def _holds_one_image(column_type: Any) -> bool:
    """Returns whether a column type is bytes in any form, or a struct with a field `bytes`.

    The Hugging Face hub uses such a struct.
    """
    import pyarrow

    if pyarrow.types.is_struct(column_type):
        position = column_type.get_field_index("bytes")
        return position >= 0 and _holds_one_image(column_type.field(position).type)
    if pyarrow.types.is_dictionary(column_type):
        return _holds_one_image(column_type.value_type)
    return (
        pyarrow.types.is_binary(column_type)
        or pyarrow.types.is_large_binary(column_type)
        or pyarrow.types.is_null(column_type)
    )


def _read_footers(directory: Directory, names: Sequence[str]) -> list[Any]:
    """Returns the metadata of files; files at a URL are not copied for it."""
    parquet = _import_parquet()
    with _parquet_errors(directory, names[0]):
        directory.look_up_sizes(names)

    def read_footer(name: str) -> Any:
        with _parquet_errors(directory, name):
            tail = directory.read_tail(name, _FIRST_READ_BYTES)
            metadata_bytes = int.from_bytes(tail[-_FOOTER_END_BYTES:-4], "little")
            footer_bytes = metadata_bytes + _FOOTER_END_BYTES
            if len(tail) < footer_bytes < _MAX_FOOTER_BYTES:
                tail = directory.read_tail(name, footer_bytes)
            return parquet.read_metadata(io.BytesIO(tail))

    with concurrent.futures.ThreadPoolExecutor(min(_FOOTER_THREADS, len(names))) as pool:
        return list(pool.map(read_footer, names))


@contextlib.contextmanager
def _parquet_errors(directory: Directory, name: str) -> Iterator[None]:
    """Turns errors of a file into a UserError that names it."""
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{directory.display_name(name)} is not a readable Parquet file ({reason}). Restore the"
            " file."
        ) from None


def _import_parquet() -> Any:
    return import_optional(
        "pyarrow.parquet", "--dataset=parquet needs pyarrow (pip install pyarrow)."
    )


def _class_names_in_metadata(footer: Any, label_column: str) -> tuple[str, ...] | None:
    """Returns the class names in a file's Hugging Face metadata, or None."""
    text = (footer.metadata or {}).get(b"huggingface")
    if not text:
        return None
    try:
        names = json.loads(text)["info"]["features"][label_column]["names"]
    except (ValueError, KeyError, TypeError):
        return None
    if not names:
        return None
    # Some files have a mapping from number to name instead of a list.
    values = names.values() if isinstance(names, dict) else names
    return tuple(map(str, values))
