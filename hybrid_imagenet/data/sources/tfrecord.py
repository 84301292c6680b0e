"""Reads TFRecord shards: TensorFlow's ImageNet layout, the plain TFDS form, and those that `data prepare` writes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_imagenet.data import classes, records, shards
from hybrid_imagenet.data.listing import Note
from hybrid_imagenet.data.sources.base import BadRecord, Loss, Source, read_at
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.files import remembered

_COMPARED = 1024  # records whose labels are compared with a list of classes: reading all takes as long as an epoch
_SURELY = 0.9  # of the classes: if all labels are below, more than the last few were missed by chance


@dataclasses.dataclass(frozen=True)
class Keys:
    """The features of an Example that hold the image and its label, and the number of the first label."""

    image: str
    label: str
    first: int


IMAGENET_KEYS = Keys("image/encoded", "image/class/label", 1)
PLAIN_KEYS = Keys("image", "label", 0)


class ShardSource(Source):
    """Gives random access to the records of a split's shards.

    Two forms of Example are read: `image/encoded` with `image/class/label` counted from 1, and `image` with `label`
    counted from 0. Checksums are verified at every read.

    Args:
      files: the shards in order.
      class_names: names in the order of the labels.
      keys: the forms of Example to look for, in this order.
      ignore_damage: go on with the readable part of damaged shards, with their `losses`, instead of raising.
      index: where the records lie, if that is known.
      expected: numbers of records that a manifest promises, by shard.

    Raises:
      UserError: for a damaged shard, no records at all, or other numbers than `expected`.
    """

    def __init__(
        self,
        files: tuple[Path, ...],
        class_names: tuple[str, ...],
        *,
        keys: tuple[Keys, ...] = (IMAGENET_KEYS, PLAIN_KEYS),
        ignore_damage: bool = False,
        expected: Sequence[int] | None = None,
        index: shards.ShardIndex | None = None,
    ) -> None:
        """Loads or builds the index."""
        super().__init__()
        self.index = index or shards.index(files)
        if self.index.damaged and not ignore_damage:
            number, gap = self.index.damaged[0]
            raise UserError(
                f"{files[number]}, offset {gap.offset}: {gap.reason}; restore the file or give --bad_records=skip"
            )
        self.num_examples = len(self.index.offset)
        self.shard_sizes = self.index.counts()
        if not self.num_examples:
            raise UserError(f"{files[0].parent}: its {len(files)} shards hold no records")
        self.losses = tuple(_losses(self.index, expected))
        wrong = expected is not None and sum(expected) != self.num_examples + self.lost
        if expected is not None and (wrong or (self.losses and not ignore_damage)):
            raise UserError(
                f"{files[0].parent}: its shards hold {self.num_examples} records, the manifest says {sum(expected)}; "
                "prepare the data set again"
            )
        self.class_names = class_names
        self.num_classes = len(class_names)
        self._keys = keys
        self._wanted = [name for form in keys for name in (form.image, form.label)]
        self._names = [str(path) for path in files]
        self.listing = [path.name for path in files]

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the shard of a record and its byte offset there."""
        return self._names[self.index.shard[index]], int(self.index.offset[index])

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads one record with a single operation."""
        image, label = self.read_unchecked(index)
        return image, self._checked_label(index, label)

    def read_unchecked(self, index: int) -> tuple[bytes, int]:
        """Returns the image and the label from 0, which may be outside of the classes.

        Raises:
          BadRecord: if the record cannot be read.
        """
        file, offset = self.locate(index)
        try:
            record = read_at(file, offset, int(self.index.length[index]), self.io)
            features = records.decode_example(records.unframe(record), self._wanted)
        except (records.RecordError, OSError) as error:
            raise BadRecord(file, offset, str(error)) from None
        return image_and_label(features, self._keys, file, offset)


def _losses(index: shards.ShardIndex, expected: Sequence[int] | None) -> Iterator[Loss]:
    """Yields each damaged place's losses; all that a manifest tells of a shard counts at the first place."""
    found = index.counts()
    gaps: dict[int, list[records.Gap]] = {}
    for number, gap in index.damaged:
        gaps.setdefault(number, []).append(gap)
    for number, path in enumerate(index.files):
        missing = max(0, int(expected[number] - found[number])) if expected is not None else None
        if missing or number in gaps:
            yield from _losses_of_shard(path, int(found[number]), missing, gaps.get(number, []))


def _losses_of_shard(path: Path, found: int, missing: int | None, gaps: Sequence[records.Gap]) -> Iterator[Loss]:
    size = path.stat().st_size
    if missing and not gaps:
        yield Loss(str(path), size, f"the shard ends early, with {found} of {found + missing} records", missing, True)
    for place, gap in enumerate(gaps):
        rest = "the rest of the shard is" if gap.end >= size else f"all up to offset {gap.end} is"
        count = 1 if missing is None else 0 if place else missing
        yield Loss(str(path), gap.offset, f"{gap.reason}; {rest} lost", count, missing is not None)


def image_and_label(
    features: dict[str, bytes | int], keys: tuple[Keys, ...], file: str, offset: int
) -> tuple[bytes, int]:
    """Returns the image and the label, from 0, of a decoded Example; raises BadRecord if it has neither form."""
    for form in keys:
        image, label = features.get(form.image), features.get(form.label)
        if isinstance(image, bytes) and isinstance(label, int):
            return image, label - form.first
    raise BadRecord(file, offset, f"lacks {' and '.join(f'{form.image} with {form.label}' for form in keys)}")


def open_directory(
    directory: Path, split: str, *, num_classes: int | None = None, ignore_damage: bool = False
) -> ShardSource:
    """Opens the shards of a directory.

    Class names come from the manifest, else from `labels.txt` or the only `*label*.txt` (one a line), else they are
    numbers; how many there are is then `num_classes`, or found by reading all training labels once.

    Raises:
      UserError: for a directory, set of shards or manifest that cannot be used.
    """
    manifest = shards.read_manifest(directory)
    files = shards.find(directory, split)
    if manifest is None:
        names, notes = _class_names(directory, split, num_classes)
        source = ShardSource(files, names, ignore_damage=ignore_damage)
        source.notes = (*shards.skipped(directory), *notes)
        return source
    entry = manifest["splits"].get(split)
    if entry is None:
        raise UserError(f"--data_dir={directory}: its manifest knows no {split} split")
    if len(entry["shards"]) != len(files):
        raise UserError(
            f"--data_dir={directory}: has {len(files)} {split} shards, the manifest lists {len(entry['shards'])}; "
            "prepare the data set again"
        )
    index = shards.stored_index(directory, split, files, entry["shards"])
    return ShardSource(
        files,
        tuple(manifest["class_names"]),
        ignore_damage=ignore_damage,
        expected=[shard["num_examples"] for shard in entry["shards"]],
        index=index,
    )


def _class_names(directory: Path, split: str, num_classes: int | None) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    place = classes.find_list(directory)
    if place is None:
        return classes.numbered(directory, num_classes or _largest_label(shards.find(directory, "train")) + 1), ()
    names = classes.listed(place, place.read_text("utf-8", "replace"))
    if split != "train":
        return names, ()
    largest = _largest_label(shards.find(directory, "train"), _COMPARED)
    notes = classes.against_labels(place, names, largest)
    return names, notes if largest + 1 < _SURELY * len(names) else ()


def _largest_label(files: tuple[Path, ...], most: int | None = None) -> int:
    """Returns the largest label, from 0, of all records or of `most` that lie evenly among them; -1 without any.

    Each record is read once; the result is remembered in the cache.
    """
    source = ShardSource(files, ("",), ignore_damage=True)
    count = source.num_examples
    wanted = np.linspace(0, count - 1, min(most or count, count)).astype(np.int64)

    def largest(part: np.ndarray[Any, Any]) -> int:
        found = -1
        for number in part:
            with contextlib.suppress(BadRecord):  # reported when it is read for training
                found = max(found, source.read_unchecked(int(number))[1])
        return found

    def found() -> int:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return max(pool.map(largest, np.array_split(wanted, 8)))

    return remembered(
        shards.cached_index("largest label", len(wanted), files=files).with_suffix(".json"),
        lambda path: int(json.loads(path.read_text())["largest"]),
        found,
        lambda path, label: path.write_text(json.dumps({"largest": label})),
    )
