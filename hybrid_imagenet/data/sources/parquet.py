"""Reads Parquet shards with an image column, as the Hugging Face hub stores image sets."""

from __future__ import annotations

import collections
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_imagenet.data.shards import SPLIT_NAMES
from hybrid_imagenet.data.sources import columns
from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.errors import UserError


class ParquetSource(Source):
    """Gives random access to rows, by whole row groups: the smallest part of a Parquet file that can be read.

    Row groups that were read stay in memory up to `cache_bytes`. A shuffled order over a set larger than that reads a
    row group for almost every image: convert such a set with `data prepare`.

    Args:
      directory: holds `train-*.parquet` (or `train.parquet`), itself or in `data/`.
      split: "train" or "validation".
      num_classes: if the files' metadata does not name the classes.
      cache_bytes: bound on the row groups in memory.

    Raises:
      UserError: without pyarrow, or for files or columns that cannot be used.
    """

    def __init__(self, directory: Path, split: str, num_classes: int | None, cache_bytes: int) -> None:
        """Reads the files' footers."""
        super().__init__()
        self._files = _find(directory, split)
        footers = [_open(path) for path in self._files]
        self._image, self._label = columns.choose(self._files[0], footers[0].schema_arrow.names)
        rows, first_group = [], [0]
        for footer in footers:
            rows += [footer.metadata.row_group(g).num_rows for g in range(footer.num_row_groups)]
            first_group.append(first_group[-1] + footer.num_row_groups)
        self._group_starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._first_group = np.array(first_group)
        self.num_examples = int(self._group_starts[-1])
        if not self.num_examples:
            raise UserError(f"{self._files[0].parent}: its Parquet files hold no rows")
        self._cache: collections.OrderedDict[int, tuple[Any, int]] = collections.OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached = 0
        self._lock = threading.Lock()
        self.class_names = _class_names(footers[0], self._label) or self._numbered(directory, num_classes)
        self.num_classes = len(self.class_names)

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file of a row and its number there."""
        group = int(np.searchsorted(self._group_starts, index, "right")) - 1
        file = int(np.searchsorted(self._first_group, group, "right")) - 1
        return str(self._files[file]), int(index - self._group_starts[self._first_group[file]])

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads one row, with its row group."""
        group = int(np.searchsorted(self._group_starts, index, "right")) - 1
        try:
            table = self._row_group(group)
        except (OSError, ValueError) as error:
            raise BadRecord(*self.locate(index), " ".join(str(error).split())[:200]) from None
        row = index - int(self._group_starts[group])
        image, label = table.column(0)[row].as_py(), table.column(1)[row].as_py()
        content = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(content, bytes) or not isinstance(label, int):
            raise BadRecord(*self.locate(index), "holds no image bytes or no label")
        return content, self._checked_label(index, label)

    def _row_group(self, group: int) -> Any:
        with self._lock:
            if group in self._cache:
                self._cache.move_to_end(group)
                return self._cache[group][0]
        file = int(np.searchsorted(self._first_group, group, "right")) - 1
        started = time.perf_counter()
        number = group - int(self._first_group[file])
        opened = _open(self._files[file])
        table = opened.read_row_group(number, columns=[self._image, self._label]).select([self._image, self._label])
        size = opened.metadata.row_group(number).total_byte_size
        self.io.add(size, 1, time.perf_counter() - started)
        with self._lock:
            if group not in self._cache:
                self._cache[group] = (table, table.nbytes)
                self._cached += table.nbytes
            while self._cached > self._cache_bytes and len(self._cache) > 1:
                self._cached -= self._cache.popitem(last=False)[1][1]
        return table

    def _numbered(self, directory: Path, num_classes: int | None) -> tuple[str, ...]:
        if num_classes is None:
            labels = [_open(path).read(columns=[self._label]).column(0) for path in _find(directory, "train")]
            num_classes = 1 + max((label for column in labels for label in column.unique().to_pylist()), default=0)
        return tuple(str(number) for number in range(num_classes))


def _find(directory: Path, split: str) -> list[Path]:
    if not directory.is_dir():
        raise UserError(f"--data_dir={directory}: no such directory")
    for name in SPLIT_NAMES[split]:
        pattern = re.compile(rf"{name}(-\d+-of-\d+.*)?\.parquet$")
        found = [p for folder in (directory, directory / "data") for p in sorted(folder.glob("*.parquet"))]
        found = [p for p in found if pattern.match(p.name)]
        if found:
            return found
    raise UserError(
        f"--data_dir={directory}: holds no {split} Parquet files (names like {split}-00000-of-00040.parquet)"
    )


def _open(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError("--dataset=parquet: needs pyarrow (pip install pyarrow)") from None
    try:
        return parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: is not a readable Parquet file ({' '.join(str(error).split())})") from None


def _class_names(file: Any, label: str) -> tuple[str, ...] | None:
    """Returns the names that the Hugging Face metadata of a file gives its label column."""
    text = (file.schema_arrow.metadata or {}).get(b"huggingface")
    try:
        names = json.loads(text)["info"]["features"][label]["names"] if text else None
    except (ValueError, KeyError, TypeError):
        return None
    return tuple(map(str, names.values() if isinstance(names, dict) else names)) if names else None
