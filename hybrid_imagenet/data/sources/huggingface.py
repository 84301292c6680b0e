"""Reads image sets that Hugging Face's package `datasets` has saved in a directory (`save_to_disk`)."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_imagenet.data import classes, listing
from hybrid_imagenet.data.registry import Glance, Request
from hybrid_imagenet.data.sources import columns
from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.errors import UserError

_STATE = "state.json"  # save_to_disk writes it for each split
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # Arrow's columnar format, "IPC Streaming Format"
_SAVE = 'DatasetDict({"train": ..., "validation": ...}).save_to_disk(DIR)'


def find(request: Request) -> Glance:
    """Finds the directory of a split."""
    return Glance(f"found in {_find(request.directory, request.split)}")


def open_split(request: Request) -> Source:
    """Opens a split."""
    return HuggingFaceSource(request.directory, request.split, request.num_classes)


class HuggingFaceSource(Source):
    """Gives random access to the rows of a split, whose Arrow files are mapped into memory.

    Args:
      directory: holds a directory for each split, as `DatasetDict.save_to_disk` writes them.
      split: "train" or "validation".
      num_classes: if the label column does not name the classes; else their number must be given.

    Raises:
      UserError: without the package `datasets`, for a directory or files that cannot be used, or for columns that hold
        no encoded images or no class numbers.
    """

    def __init__(self, directory: Path, split: str, num_classes: int | None) -> None:
        """Maps the files and looks at their columns."""
        super().__init__()
        self._place = _find(directory, split)
        rows = _load(self._place)
        self.listing = [Path(file["filename"]).name for file in rows.cache_files]
        image, label = columns.choose(self._place, rows.column_names)
        _check(self._place, rows.features, image, label)
        self.num_examples = len(rows)
        if not self.num_examples:
            raise UserError(f"{self._place}: holds no rows")
        names = getattr(rows.features[label], "names", None)
        self.class_names = tuple(names) if names else classes.numbered(self._place, num_classes)
        self.num_classes = len(self.class_names)
        undecoded = rows.cast_column(image, _package().Image(decode=False))
        self._rows = undecoded.with_format("arrow").select_columns([image, label])

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the directory of the split and the number of the row."""
        return str(self._place), index

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads one row."""
        started = time.perf_counter()
        row = self._rows[index]
        image, label = row.column(0)[0], row.column(1)[0].as_py()
        try:
            content = _content(image)
        except (OSError, ValueError) as error:
            raise BadRecord(*self.locate(index), str(error)) from None
        self.io.add(len(content), 1, time.perf_counter() - started)
        if label is None:
            raise BadRecord(*self.locate(index), "has no label")
        return content, self._checked_label(index, label)


def _content(image: Any) -> bytes:
    """Returns the bytes of an image that is kept in its row, or in a file that the row names."""
    import pyarrow

    if image.is_valid and image["bytes"].is_valid:
        # Unlike the value's as_py, this copies without the interpreter's lock: a page that has yet to come from the
        # disk stops no other thread.
        content: bytes = pyarrow.BufferReader(image["bytes"].as_buffer()).read()
        return content
    if image.is_valid and image["path"].is_valid:
        return Path(image["path"].as_py()).read_bytes()
    raise ValueError("holds neither an image's bytes nor the path of its file")


def _find(directory: Path, split: str) -> Path:
    """Returns the directory of a split; raises UserError if there is none."""
    saved = [path.parent.name for path in directory.glob(f"*/{_STATE}")]
    found = listing.of_split(str(directory), split, lambda word: [word] if word in saved else [])
    if found:
        return directory / found[0]
    if (directory / _STATE).is_file():
        raise UserError(
            f"--data_dir={directory}: is one Dataset without splits: divide it (train_test_split) and save {_SAVE}"
        )
    words = " or ".join(listing.SPLIT_NAMES[split])
    raise UserError(
        f"--data_dir={directory}: holds no {split} split ({words}) that save_to_disk wrote; save both: {_SAVE}"
    )


def _package() -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError("--dataset=huggingface: needs Hugging Face's datasets (pip install datasets)") from None
    return datasets


def _load(place: Path) -> Any:
    """Returns a split; nothing of its images is read."""
    datasets = _package()
    try:
        with _without_progress(datasets):
            rows = datasets.load_from_disk(str(place))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        files = sorted(place.glob("*.arrow"))
        if not files:
            raise UserError(f"{place}: holds no rows (no Arrow file)") from None
        cut = _cut_short(files)
        reason = f"{cut}: is cut short" if cut else f"{place}: cannot be read ({' '.join(str(error).split())[:200]})"
        raise UserError(f"{reason}; save the data set again") from None
    # Without its end a file just has fewer rows.
    cut = _cut_short([Path(file["filename"]) for file in rows.cache_files])
    if cut:
        raise UserError(f"{cut}: is cut short; save the data set again")
    return rows


@contextlib.contextmanager
def _without_progress(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    if shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _cut_short(files: list[Path]) -> Path | None:
    """Returns the first of some Arrow files that does not end as Arrow's streams do."""
    for path in files:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - len(_END_OF_STREAM)))
            if file.read() != _END_OF_STREAM:
                return path
    return None


def _check(place: Path, features: Any, image: str, label: str) -> None:
    """Raises UserError unless the columns hold encoded images, or their files' paths, and class numbers."""
    datasets = _package()
    images, labels = features[image], features[label]
    encoded = ("binary", "large_binary", "string", "large_string")
    if not isinstance(images, datasets.Image) and getattr(images, "dtype", None) not in encoded:
        raise UserError(
            f"{place}: column {image} holds {type(images).__name__}, not encoded images: save it as datasets.Image() "
            "(Dataset.map with features)"
        )
    if not re.fullmatch(r"u?int\d+", str(getattr(labels, "dtype", None))):
        raise UserError(
            f"{place}: column {label} holds {getattr(labels, 'dtype', type(labels).__name__)}, not class numbers: save "
            f'the set after class_encode_column("{label}")'
        )
