"""Reads and writes TFRecord shards: TensorFlow's ImageNet layout, the plain TFDS form, and what
`data prepare` writes.

A TFRecord is: length (uint64), masked CRC-32C of the length, payload, masked CRC-32C of the
payload, all little-endian. The payload is a tf.train.Example. Neither needs TensorFlow here.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from hybrid_imagenet import files
from hybrid_imagenet.data import listing
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.directories import Directory
from hybrid_imagenet.data.sources.source import (
    BadRecord,
    Source,
    check_directory,
    load_index,
    read_at,
    remembered,
)
from hybrid_imagenet.errors import UserError

MANIFEST = "manifest.json"
HEADER_BYTES = 12
FOOTER_BYTES = 4
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_MAX_RECORD = 1 << 31
_SHARD = re.compile(r"(?P<stem>.+)-\d{5,}-of-\d{5,}(\.tfrecord)?$")
_LIKE_SHARD = re.compile(r"[^.].*(\d-of-\d|\.tfrecord)")
_PACKED = re.compile(r"\.(gz|gzip|zlib|zz|zst|bz2|xz)$")
_INDEX_VERSION = 3
Values = list[Any]
"""The values of one feature of an Example: bytes, whole numbers or floating-point numbers."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """The features of an Example that hold the image and its label, and the number of the first
    label.
    """

    image: str
    label: str
    first: int


IMAGENET_KEYS = Keys("image/encoded", "image/class/label", 1)
PLAIN_KEYS = Keys("image", "label", 0)


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """Locates each record of a split.

    Attributes:
      shard, offset, length: int64 [n] each; the file number, first byte and bytes (with framing) of
        each record.
    """

    shard: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


class ShardSource(Source):
    """Gives random access to the records of a split's shards.

    Two forms of Example are read: `image/encoded` with `image/class/label` counted from 1, and
    `image` with `label` counted from 0. Checksums are verified at every read.

    Raises:
      UserError: for a damaged shard, no records at all, or another number than `expected`, a
        manifest's.
    """

    def __init__(
        self,
        files: Sequence[Path],
        class_names: tuple[str, ...],
        *,
        keys: tuple[Keys, ...] = (IMAGENET_KEYS, PLAIN_KEYS),
        expected: int | None = None,
        index: ShardIndex | None = None,
    ) -> None:
        super().__init__()
        self.files = files
        self.index = index or index_of(files)
        self.num_examples = len(self.index.offset)
        self.shard_sizes: npt.NDArray[np.int64] = np.bincount(
            self.index.shard, minlength=len(files)
        )
        if not self.num_examples:
            raise UserError(f"{files[0].parent}: its {len(files)} shards hold no records")
        if expected is not None and expected != self.num_examples:
            raise UserError(
                f"{files[0].parent}: its shards hold {self.num_examples} records, the manifest says"
                f" {expected}; prepare the dataset again"
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
        file, offset = self.locate(index)
        try:
            record = read_at(file, offset, int(self.index.length[index]), self.reads)
            features = decode_example(unframe(record), self._wanted)
        except RecordError as error:
            raise BadRecord(file, offset, str(error)) from None
        except OSError as error:
            check_directory(file)
            raise BadRecord(file, offset, error.strerror or str(error)) from None
        for form in self._keys:
            images = features.get(form.image)
            labels = features.get(form.label)
            if images and labels:
                if reason := _why_not_one_image_with_one_class(form, images, labels):
                    raise BadRecord(file, offset, reason)
                image = images[0]
                label = labels[0]
                if 0 <= label < form.first:  # all other labels would be those of their neighbors
                    reason = (
                        f"{form.label} is {label}, but counts from {form.first}: labels from 0 are"
                        " to be in "
                    )
                    raise BadRecord(
                        file,
                        offset,
                        f"{reason}{PLAIN_KEYS.label}, their images in {PLAIN_KEYS.image}",
                    )
                return image, self._checked_label(index, label - form.first)
        wanted = " or ".join(f"{form.image} with {form.label}" for form in self._keys)
        raise BadRecord(file, offset, f"the Example has no {wanted}")


def find(request: DatasetRequest) -> SplitSummary:
    """Finds the shards of a split."""
    manifest = read_manifest(request.directory)
    find_shards(request.directory, request.split)
    return SplitSummary(f"found in {request.directory}", len(_class_names(request, manifest)))


def open_split(request: DatasetRequest) -> Source:
    """Opens the shards of a split in a directory.

    The manifest of `data prepare` tells the class names and the counts. Otherwise `labels.txt`
    lists the classes, one per line, or the request has their number.

    Raises:
      UserError: for a directory, set of shards or manifest that cannot be used.
    """
    directory, split = request.directory, request.split
    manifest = read_manifest(directory)
    shards = find_shards(directory, split)
    names = _class_names(request, manifest)
    if manifest is None:
        source = ShardSource(shards, names)
        source.notes = listing.unassigned_files(str(directory), *_shards_by_split_name(directory))
        if empty := [
            path for path, size in zip(shards, source.shard_sizes, strict=True) if not size
        ]:
            source.notes += (
                listing.DatasetNote(
                    f"{len(empty)} of {len(shards)} shards are empty: {empty[0]}, ..."
                ),
            )
        if (directory / listing.LABELS_FILE).is_file():
            source.class_list = str(directory / listing.LABELS_FILE)
        return source
    entry = manifest["splits"].get(split)
    if entry is None:
        raise UserError(f"--data_dir={directory}: its manifest knows no {split} split")
    if len(entry["shards"]) != len(shards):
        raise UserError(
            f"--data_dir={directory}: has {len(shards)} {split} shards, the manifest lists"
            f" {len(entry['shards'])}; prepare the dataset again"
        )
    index = None
    if [path.stat().st_size for path in shards] == [shard["bytes"] for shard in entry["shards"]]:
        index = files.read_or_none(lambda: load_index(directory / f"{split}.index.npz", ShardIndex))
    return ShardSource(shards, names, expected=entry["num_examples"], index=index)


def _class_names(request: DatasetRequest, manifest: Mapping[str, Any] | None) -> tuple[str, ...]:
    if manifest is not None:
        return tuple(manifest["class_names"])
    place = request.directory / listing.LABELS_FILE
    if place.is_file():
        return listing.parse_class_list(place, files.read_regular(place, files.MAX_TEXT_BYTES))
    return listing.numbered_class_names(request.directory, request.num_classes)


def find_shards(directory: Path, split: str) -> tuple[Path, ...]:
    """Returns the shards of `split` ("train" or "validation") in a directory.

    Raises:
      UserError: if it holds no shard of the split, lacks one, or holds several sets.
    """
    found = listing.files_of_split(str(directory), split, _shards_by_split_name(directory)[1])
    if not found:
        for name in _shards_by_split_name(directory, packed=True)[1](split):
            _check_is_not_compressed(directory / name)
        raise UserError(
            f"--data_dir={directory}: holds no {split} shards (names like {split}-00000-of-01024)"
        )
    return tuple(
        directory / name for name in listing.complete_file_set(str(directory), split, found)
    )


def has_shards(directory: Path, split: str) -> bool:
    """Returns whether a directory holds files with names of shards of `split`."""
    return bool(_shards_by_split_name(directory)[1](split))


def _shards_by_split_name(
    directory: Path, *, packed: bool = False
) -> tuple[list[str], Callable[[str], list[str]]]:
    """Returns what looks like a shard by its name, and a function that finds those of a split's
    word.

    With `packed`, names may also end in the suffix of a compressed file.

    Shards lie in the directory, or if none does in one for each split, as TensorFlow's
    imagenet_to_gcs.py writes them: `train/train-00000-of-01024`.
    """
    bases = {name: PurePath(name).name for name in Directory(str(directory)).list_files()}
    names = [name for name, base in bases.items() if _LIKE_SHARD.match(base)]
    names = [name for name in names if name == bases[name]] or names
    words: dict[str, str] = {}
    for name in names:
        base = _PACKED.sub("", bases[name]) if packed else bases[name]
        if match := _SHARD.match(base):
            words[name] = match["stem"].removesuffix(".tfrecord")
    return names, lambda word: [
        name for name, stem in words.items() if stem.rpartition("-")[2] == word
    ]


def index_of(shards: Sequence[Path]) -> ShardIndex:
    """Returns the index of some shards, from the cache if they have not changed since they were
    scanned.
    """
    place = files.cached_index_path("tfrecord", _INDEX_VERSION, of=shards)
    return remembered(place, ShardIndex, lambda: scan_all(shards))


def scan_all(shards: Sequence[Path]) -> ShardIndex:
    """Returns the index of some shards; raises UserError for damaged ones."""
    with concurrent.futures.ThreadPoolExecutor(min(16, len(shards))) as pool:
        scans = list(pool.map(scan, shards))
    damaged = [
        f"{path}, {damage}" for path, (_, _, damage) in zip(shards, scans, strict=True) if damage
    ]
    if damaged:
        raise UserError(
            f"{damaged[0]} ({len(damaged)} of {len(shards)} shards are damaged); restore the file"
        )
    offsets, lengths, _ = zip(*scans, strict=True)
    numbers = np.repeat(np.arange(len(shards), dtype=np.int64), list(map(len, offsets)))
    return ShardIndex(numbers, np.concatenate(offsets), np.concatenate(lengths))


def scan(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], str]:
    """Finds the records of a shard by hopping from header to header.

    Returns:
      (offsets, lengths, damage): int64 [n] each, where a record begins and its bytes with header
      and checksums; and the place and reason where the rest makes no sense, "" for a whole file.
    """
    offsets: list[int] = []
    lengths: list[int] = []
    offset, damage = 0, ""
    try:
        with files.open_regular(path, buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            while offset < size:
                length = (
                    HEADER_BYTES
                    + header_length(os.pread(file.fileno(), HEADER_BYTES, offset))
                    + FOOTER_BYTES
                )
                if offset + length > size:
                    raise RecordError(f"the record is truncated: {size - offset} of {length} bytes")
                offsets.append(offset)
                lengths.append(length)
                offset += length
    except RecordError as error:
        damage = f"offset {offset}: {error}"
        if not offsets:
            _check_is_not_compressed(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return np.array(offsets, np.int64), np.array(lengths, np.int64), damage


def _check_is_not_compressed(path: Path) -> None:
    """Raises UserError for a compressed shard: offsets in it are not those of its records."""
    with files.open_regular(path) as file:
        found = files.detect_compression(file.read(HEADER_BYTES))
    if found:
        name, command = found
        raise UserError(
            f"{path}: is compressed ({name}), but records are read in random order. Decompress each"
            f" shard into another directory, as in: mkdir plain; {command} < {path.name} >"
            f" plain/{_PACKED.sub('', path.name)}"
        )


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Returns the manifest that `data prepare` writes, or None.

    Raises:
      UserError: if there is one that cannot be read.
    """
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        manifest: dict[str, Any] = json.loads(files.read_regular(path, files.MAX_TEXT_BYTES))
        names, splits = manifest["class_names"], manifest["splits"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("class_names is no list of texts")
        for split, entry in splits.items():
            rows = [
                (shard["num_examples"], shard["bytes"], shard["crc32c"])
                for shard in entry["shards"]
            ]
            counts, sizes, _ = zip(*rows, strict=True)
            if (
                not all(type(number) is int for number in (*counts, *sizes))
                or sum(counts) != entry["num_examples"]
            ):
                raise ValueError(f"num_examples of {split} is not the sum of its shards")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: is not a readable manifest ({error!r}); prepare the dataset again"
        ) from None
    return manifest


class RecordError(ValueError):
    """Bytes that are not the record or message they should be."""


def masked_crc(data: bytes) -> int:
    """Returns the CRC-32C as TFRecords store it: rotated right by 15 bits, plus a constant, modulo
    2^32.
    """
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Returns one TFRecord with its lengths and checksums."""
    length = _LENGTH.pack(len(payload))
    return b"".join(
        (length, _CRC.pack(masked_crc(length)), payload, _CRC.pack(masked_crc(payload)))
    )


def unframe(record: bytes) -> bytes:
    """Returns the payload of one TFRecord.

    Raises:
      RecordError: if it is shorter than it says, or a checksum does not match.
    """
    length = header_length(record[:HEADER_BYTES])
    if len(record) < HEADER_BYTES + length + FOOTER_BYTES:
        raise RecordError(
            f"the record is truncated: {len(record)} of {HEADER_BYTES + length + FOOTER_BYTES}"
            " bytes"
        )
    payload = record[HEADER_BYTES : HEADER_BYTES + length]
    if _CRC.unpack_from(record, HEADER_BYTES + length)[0] != masked_crc(payload):
        raise RecordError("the checksum of the data does not match")
    return payload


def header_length(header: bytes) -> int:
    """Returns the payload length that a 12-byte record header holds; raises RecordError if it is
    damaged.
    """
    if len(header) < HEADER_BYTES:
        raise RecordError(f"the record header is truncated: {len(header)} of {HEADER_BYTES} bytes")
    if _CRC.unpack_from(header, 8)[0] != masked_crc(header[:8]):
        raise RecordError("the checksum of the record's length does not match")
    length: int = _LENGTH.unpack_from(header)[0]
    if length > _MAX_RECORD:
        raise RecordError(f"the record claims {length} bytes")
    return length


# The messages of TensorFlow's example.proto and feature.proto, so that no reader has to import
# TensorFlow.
_PROTO = """
name: "example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tensorflow.Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
    type_name: ".tensorflow.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.Feature" label: LABEL_OPTIONAL } } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.Features" } }
"""  # noqa: E501
_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
_Example = message_factory.GetMessageClass(_pool.FindMessageTypeByName("tensorflow.Example"))


def encode_example(features: Mapping[str, bytes | int]) -> bytes:
    """Returns a serialized tf.train.Example with one value per feature: bytes or a 64-bit
    integer.
    """
    example = _Example()
    for key, value in features.items():
        if isinstance(value, bytes):
            example.features.feature[key].bytes_list.value.append(value)
        else:
            example.features.feature[key].int64_list.value.append(value)
    encoded: bytes = example.SerializeToString(deterministic=True)
    return encoded


def decode_example(payload: bytes, wanted: Iterable[str]) -> dict[str, Values]:
    """Returns the values of each wanted feature that a serialized tf.train.Example has and that is
    not empty.

    Raises:
      RecordError: if the bytes are not an Example.
    """
    try:
        feature = _Example.FromString(payload).features.feature
    except DecodeError as error:
        raise RecordError(f"the record is not an Example ({error})") from None
    values: dict[str, Values] = {}
    for key in wanted:
        if key not in feature:
            continue
        item = feature[key]
        for kind in (item.bytes_list, item.int64_list, item.float_list):
            if kind.value:
                values[key] = list(kind.value)
    return values


def _why_not_one_image_with_one_class(form: Keys, images: Values, labels: Values) -> str:
    """Returns why the two features of an Example are not one image and one class number; "" if they
    are.
    """
    if len(images) > 1:
        return f"{form.image} holds {len(images)} values: write one image into each record"
    if not isinstance(images[0], bytes):
        return f"{form.image} holds {_kind(images[0])} instead of the bytes of an encoded image"
    if len(labels) > 1:
        return (
            f"{form.label} holds {len(labels)} values, as one-hot or several labels do: write one"
            " class number into each record"
        )
    if not isinstance(labels[0], int):
        return f"{form.label} holds {_kind(labels[0])} instead of a class number"
    return ""


def _kind(value: bytes | int | float) -> str:
    return {bytes: "bytes", int: "a whole number", float: "a floating-point number"}[type(value)]
