"""Reads and writes TFRecord shards.

Three layouts are read: TensorFlow's ImageNet layout, the plain one of TFDS, and the one that
`data prepare` writes.

A TFRecord is: length (uint64), masked CRC-32C of the length, payload, masked CRC-32C of the
payload, all little-endian. The payload is a tf.train.Example. This module reads and writes both
without TensorFlow.
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
from typing import Any, NamedTuple

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
    load_index,
    load_or_build_index,
    raise_if_file_may_be_intact,
    read_at,
)
from hybrid_imagenet.errors import UserError

MANIFEST = "manifest.json"
HEADER_BYTES = 12
FOOTER_BYTES = 4
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
# Protocol buffers are limited to 2 GiB, so a longer record is damage.
_MAX_PAYLOAD_BYTES = 1 << 31
_SHARD_NAME = re.compile(r"(?P<stem>.+)-\d{5,}-of-\d{5,}(\.tfrecord)?$")
# Names that resemble those of shards, so that a note can report files that belong to no split.
_SHARD_LIKE_NAME = re.compile(r"[^.].*(\d-of-\d|\.tfrecord)")
_COMPRESSION_SUFFIX = re.compile(r"\.(gz|gzip|zlib|zz|zst|bz2|xz)$")
# Part of the key of cached indices. Increase it when `ShardIndex` or `scan_shard` changes.
_INDEX_VERSION = 3
_SCAN_THREADS = 16
_MAX_NAMED_FEATURES = 10
FeatureValues = list[Any]
"""The values of one feature of an Example: bytes, integers or floating-point numbers."""


@dataclasses.dataclass(frozen=True)
class ExampleFormat:
    """Names the features of an Example that hold the image and its label.

    Attributes:
      image: Name of the feature with the encoded image.
      label: Name of the feature with the class number.
      first_label: The class number of the first class, 0 or 1.
    """

    image: str
    label: str
    first_label: int


IMAGENET_FORMAT = ExampleFormat("image/encoded", "image/class/label", 1)
PLAIN_FORMAT = ExampleFormat("image", "label", 0)


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """Locates each record of a split.

    Attributes:
      shard: Number of the file that holds each record, int64 [n].
      offset: First byte of each record, int64 [n].
      length: Number of bytes of each record with its framing, int64 [n].
    """

    shard: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


class ShardSource(Source):
    """Gives random access to the records of the shards of a split.

    Checksums are verified at every read.

    Args:
      shards: The files, in order.
      class_names: One name per class.
      formats: The formats of Examples to look for. By default, `image/encoded` with
        `image/class/label` counted from 1, and `image` with `label` counted from 0.
      expected_examples: Number of records that a manifest promises; None without a manifest.
      index: Positions of the records; by default it is loaded from the cache, or built.

    Raises:
      UserError: If a shard is damaged, if there are no records, or if their number is not
        `expected_examples`.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        class_names: tuple[str, ...],
        *,
        formats: tuple[ExampleFormat, ...] = (IMAGENET_FORMAT, PLAIN_FORMAT),
        expected_examples: int | None = None,
        index: ShardIndex | None = None,
    ) -> None:
        super().__init__()
        directory = shards[0].parent
        self.shards = shards
        self.index = index or load_or_scan_index(shards)
        self.num_examples = len(self.index.offset)
        self.shard_sizes: npt.NDArray[np.int64] = np.bincount(
            self.index.shard, minlength=len(shards)
        )
        if not self.num_examples:
            raise UserError(
                f"The {len(shards)} shards in {directory} hold no records. Restore them, or correct"
                " --data_dir."
            )
        if expected_examples is not None and expected_examples != self.num_examples:
            raise UserError(
                f"The shards in {directory} hold {self.num_examples} records instead of"
                f" {expected_examples}. Prepare the dataset again."
            )
        self.class_names = class_names
        self.num_classes = len(class_names)
        self.file_names = [path.name for path in shards]
        self._paths = [str(path) for path in shards]
        self._formats = formats
        self._feature_names: list[str] = []
        for example_format in formats:
            self._feature_names += [example_format.image, example_format.label]

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the shard of a record and its byte offset there."""
        return self._paths[self.index.shard[index]], int(self.index.offset[index])

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads one record with a single operation."""
        file, offset = self.locate(index)
        try:
            record = read_at(file, offset, int(self.index.length[index]), self.reads)
            image, label = self._image_and_label(unframe(record))
        except RecordError as error:
            raise BadRecord(file, offset, str(error)) from None
        except OSError as error:
            raise_if_file_may_be_intact(file, error)
            raise BadRecord(file, offset, error.strerror or str(error)) from None
        return image, self._validate_label(index, label)

    def check_first_record(self) -> None:
        """Checks that the first record has the features that are read, unless it is damaged.

        The others were written by the same program. If all of them were reported as bad records,
        the advice would be to skip them.

        Raises:
          UserError: If the record is intact, but does not have one image and one class number.
        """
        path, offset = self.locate(0)
        try:
            # `read_at` would keep the file open, even on a rank that never reads it.
            with files.open_regular(path, buffering=0) as file:
                record = os.pread(file.fileno(), int(self.index.length[0]), offset)
            self._image_and_label(unframe(record))
        except FeatureError as error:
            raise UserError(
                f"{path}, offset {offset}: {error}. The other records are probably written in the"
                " same way. Write them again, with the encoded image of each in"
                f" {PLAIN_FORMAT.image} and its class number, counted from 0, in"
                f" {PLAIN_FORMAT.label}."
            ) from None
        except (RecordError, OSError):
            # It is reported as a bad record when it is read.
            pass

    def _image_and_label(self, payload: bytes) -> tuple[bytes, int]:
        """Returns the encoded image and the label, counted from 0, of an Example.

        Raises:
          FeatureError: If the Example does not have exactly one image and one class number.
          RecordError: If the payload is not an Example.
        """
        features = decode_example(payload, self._feature_names)
        for example_format in self._formats:
            images = features.get(example_format.image)
            labels = features.get(example_format.label)
            if images and labels:
                _check_features(example_format, images, labels)
                return images[0], labels[0] - example_format.first_label
        pairs = [f"{known.image} with {known.label}" for known in self._formats]
        raise FeatureError(
            f"the Example has no {' or '.join(pairs)}. It has {_list_features(payload)}"
        )


def _list_features(payload: bytes) -> str:
    """Returns the names of the features of a serialized Example that have values."""
    names = sorted(decode_example(payload))
    shown_names = ", ".join(names[:_MAX_NAMED_FEATURES])
    if len(names) > _MAX_NAMED_FEATURES:
        return f"{shown_names} and {len(names) - _MAX_NAMED_FEATURES} more"
    return shown_names or "no features"


def _check_features(
    example_format: ExampleFormat, images: FeatureValues, labels: FeatureValues
) -> None:
    """Raises FeatureError unless there are one encoded image and one class number."""
    image_name = example_format.image
    label_name = example_format.label
    if len(images) > 1:
        raise FeatureError(f"{image_name} holds {len(images)} values: write one image per record")
    if not isinstance(images[0], bytes):
        raise FeatureError(
            f"{image_name} holds {_type_name(images[0])} instead of the bytes of an encoded image"
        )
    if len(labels) > 1:
        raise FeatureError(
            f"{label_name} holds {len(labels)} values, as one-hot or multiple labels do: write one"
            " class number per record"
        )
    if not isinstance(labels[0], int):
        raise FeatureError(f"{label_name} holds {_type_name(labels[0])} instead of a class number")
    # If one label is too small, the writer counted from 0, so all others would be read as the class
    # before their own.
    if 0 <= labels[0] < example_format.first_label:
        raise FeatureError(
            f"{label_name} is {labels[0]}, but counts from {example_format.first_label}: store"
            f" labels that count from 0 in {PLAIN_FORMAT.label}, and their images in"
            f" {PLAIN_FORMAT.image}"
        )


def _type_name(value: bytes | int | float) -> str:
    if isinstance(value, bytes):
        return "bytes"
    return "an integer" if isinstance(value, int) else "a floating-point number"


def probe_split(request: DatasetRequest) -> SplitSummary:
    """Finds the shards of a split."""
    manifest = read_manifest(request.directory)
    find_shards(request.directory, request.split)
    return SplitSummary(f"found in {request.directory}", len(_class_names(request, manifest)))


def open_split(request: DatasetRequest) -> Source:
    """Opens the shards of a split in a directory.

    The manifest of `data prepare` has the class names and the counts. Without a manifest,
    `labels.txt` lists the classes, one per line, or the request has their number.

    Raises:
      UserError: If the directory, the set of shards or the manifest cannot be used.
    """
    directory = request.directory
    manifest = read_manifest(directory)
    shards = find_shards(directory, request.split)
    class_names = _class_names(request, manifest)
    if manifest is None:
        return _open_plain_shards(directory, shards, class_names)
    return _open_prepared_shards(directory, request.split, shards, class_names, manifest)


def _open_plain_shards(
    directory: Path, shards: Sequence[Path], class_names: tuple[str, ...]
) -> ShardSource:
    """Opens shards that have no manifest."""
    source = ShardSource(shards, class_names)
    source.check_first_record()
    names = _shard_like_names(directory)
    source.notes = listing.unassigned_files(str(directory), names, _shards_by_split_name(names))
    empty_shards = [
        path for path, size in zip(shards, source.shard_sizes, strict=True) if size == 0
    ]
    if empty_shards:
        text = f"{len(empty_shards)} of {len(shards)} shards are empty: {empty_shards[0]}, ..."
        source.notes += (listing.DatasetNote(text),)
    labels_file = directory / listing.LABELS_FILE
    if labels_file.is_file():
        source.unverified_class_list = str(labels_file)
    return source


def _open_prepared_shards(
    directory: Path,
    split: str,
    shards: Sequence[Path],
    class_names: tuple[str, ...],
    manifest: Mapping[str, Any],
) -> ShardSource:
    """Opens shards that `data prepare` has written."""
    entry = manifest["splits"].get(split)
    if entry is None:
        raise UserError(
            f"{directory / MANIFEST} does not list a {split} split. Prepare the dataset again."
        )
    if len(entry["shards"]) != len(shards):
        raise UserError(
            f"--data_dir={directory} has {len(shards)} {split} shards, but {MANIFEST} lists"
            f" {len(entry['shards'])}. Prepare the dataset again."
        )
    index = None
    sizes = [path.stat().st_size for path in shards]
    # The stored index is only valid for the files that were prepared.
    if sizes == [shard["bytes"] for shard in entry["shards"]]:
        index = files.read_or_none(lambda: load_index(directory / f"{split}.index.npz", ShardIndex))
    return ShardSource(shards, class_names, expected_examples=entry["num_examples"], index=index)


def _class_names(request: DatasetRequest, manifest: Mapping[str, Any] | None) -> tuple[str, ...]:
    if manifest is not None:
        return tuple(manifest["class_names"])
    labels_file = request.directory / listing.LABELS_FILE
    if labels_file.is_file():
        content = files.read_regular(labels_file, files.MAX_TEXT_BYTES)
        return listing.parse_class_list(labels_file, content)
    return listing.numbered_class_names(request.directory, request.num_classes)


def find_shards(directory: Path, split: str) -> tuple[Path, ...]:
    """Finds the shards of `split` ("train" or "validation") in a directory.

    Raises:
      UserError: If there is no shard of the split, if one is missing, or if there are several sets.
    """
    names = _shard_like_names(directory)
    shards = listing.files_of_split(str(directory), split, _shards_by_split_name(names))
    if not shards:
        for name in _shards_by_split_name(names, compressed=True)(split):
            _raise_if_compressed(directory / name)
        raise UserError(
            f"--data_dir={directory} holds no {split} shards. Their names must be like"
            f" {split}-00000-of-01024."
        )
    return tuple(
        directory / name for name in listing.complete_file_set(str(directory), split, shards)
    )


def has_shards(directory: Path, split: str) -> bool:
    """Returns whether a directory holds files with names of shards of `split`."""
    return bool(_shards_by_split_name(_shard_like_names(directory))(split))


def _shard_like_names(directory: Path) -> list[str]:
    """Returns the names of files that look like shards, relative to `directory`.

    Shards are in the directory itself. If there are none, each split has its own subdirectory, as
    TensorFlow's imagenet_to_gcs.py writes them: `train/train-00000-of-01024`.
    """
    names = [
        name
        for name in Directory(str(directory)).list_files()
        if _SHARD_LIKE_NAME.match(PurePath(name).name)
    ]
    top_level_names = [name for name in names if "/" not in name]
    return top_level_names or names


def _shards_by_split_name(
    names: Iterable[str], *, compressed: bool = False
) -> Callable[[str], list[str]]:
    """Returns a function that finds the shards of a name such as "train" or "val".

    Args:
      names: Names of files, as `_shard_like_names` returns them.
      compressed: Whether names may also end with the suffix of a compressed file.
    """
    shards: dict[str, list[str]] = {}
    for name in names:
        base = PurePath(name).name
        if compressed:
            base = _COMPRESSION_SUFFIX.sub("", base)
        match = _SHARD_NAME.match(base)
        if match:
            split_name = match["stem"].removesuffix(".tfrecord").rpartition("-")[2]
            shards.setdefault(split_name, []).append(name)
    return lambda split_name: shards.get(split_name, [])


def load_or_scan_index(shards: Sequence[Path]) -> ShardIndex:
    """Returns the index of shards, from the cache if they have not changed."""
    cache_file = files.cached_index_path("tfrecord", _INDEX_VERSION, files=shards)
    return load_or_build_index(cache_file, ShardIndex, lambda: scan_shards(shards))


def scan_shards(shards: Sequence[Path]) -> ShardIndex:
    """Builds the index of shards.

    Raises:
      UserError: If one is damaged or cannot be read.
    """
    with concurrent.futures.ThreadPoolExecutor(min(_SCAN_THREADS, len(shards))) as pool:
        scans = list(pool.map(scan_shard, shards))
    damaged = [
        f"{path}, {scan.damage}" for path, scan in zip(shards, scans, strict=True) if scan.damage
    ]
    if damaged:
        raise UserError(
            f"{damaged[0]} ({len(damaged)} of {len(shards)} shards are damaged). Restore the file."
        )
    sizes = [len(scan.offsets) for scan in scans]
    shard_numbers = np.repeat(np.arange(len(shards), dtype=np.int64), sizes)
    offsets = np.concatenate([scan.offsets for scan in scans])
    lengths = np.concatenate([scan.lengths for scan in scans])
    return ShardIndex(shard_numbers, offsets, lengths)


class ShardScan(NamedTuple):
    """The records of one shard.

    Attributes:
      offsets: First byte of each record, int64 [n].
      lengths: Number of bytes of each record with header and checksums, int64 [n].
      damage: Offset and reason where the file is damaged; "" if it is intact.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    damage: str


def scan_shard(path: Path) -> ShardScan:
    """Finds the records of a shard by reading one header after another.

    Raises:
      UserError: If the file is compressed or cannot be read.
    """
    offsets: list[int] = []
    lengths: list[int] = []
    offset = 0
    damage = ""
    try:
        with files.open_regular(path, buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            while offset < size:
                header = os.pread(file.fileno(), HEADER_BYTES, offset)
                length = HEADER_BYTES + payload_length(header) + FOOTER_BYTES
                if offset + length > size:
                    raise RecordError(f"the record is truncated: {size - offset} of {length} bytes")
                offsets.append(offset)
                lengths.append(length)
                offset += length
    except RecordError as error:
        damage = f"offset {offset}: {error}"
        if not offsets:
            _raise_if_compressed(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}). Restore the file, or correct its"
            " permissions."
        ) from None
    return ShardScan(np.array(offsets, np.int64), np.array(lengths, np.int64), damage)


def _raise_if_compressed(path: Path) -> None:
    """Raises UserError for a compressed shard, which allows no random access."""
    with files.open_regular(path) as file:
        compression = files.detect_compression(file.read(HEADER_BYTES))
    if compression:
        name, command = compression
        target = _COMPRESSION_SUFFIX.sub("", path.name)
        raise UserError(
            f"{path} is compressed ({name}), but records are read in random order. Decompress each"
            f" shard into another directory, as in: mkdir plain; {command} < {path.name} >"
            f" plain/{target}"
        )


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Reads the manifest that `data prepare` writes; returns None if there is none.

    Raises:
      UserError: If there is one that cannot be read.
    """
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        manifest: dict[str, Any] = json.loads(files.read_regular(path, files.MAX_TEXT_BYTES))
        _check_manifest(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a readable manifest ({error!r}). Prepare the dataset again."
        ) from None
    return manifest


def _check_manifest(manifest: Any) -> None:
    """Raises one of several exceptions for a manifest of another form."""
    class_names = manifest["class_names"]
    if not isinstance(class_names, list):
        raise TypeError("class_names is not a list")
    if not all(isinstance(name, str) for name in class_names):
        raise TypeError("class_names is not a list of strings")
    for split, entry in manifest["splits"].items():
        if not entry["shards"]:
            raise ValueError(f"the {split} split has no shards")
        for shard in entry["shards"]:
            if type(shard["num_examples"]) is not int or type(shard["bytes"]) is not int:
                raise TypeError(f"num_examples or bytes of a {split} shard is not an integer")
            if "crc32c" not in shard:
                raise KeyError("crc32c")
        if sum(shard["num_examples"] for shard in entry["shards"]) != entry["num_examples"]:
            raise ValueError(f"num_examples of {split} is not the sum of its shards")


class RecordError(ValueError):
    """Reports bytes that are not the record or the Example that they should be."""


class FeatureError(RecordError):
    """Reports an intact Example whose features are not one image and one class number."""


def masked_crc(data: bytes) -> int:
    """Returns the masked CRC-32C that TFRecords store.

    The mask rotates the CRC right by 15 bits and adds a constant, modulo 2^32.
    """
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Returns one TFRecord: the payload with its length and checksums."""
    length = _LENGTH.pack(len(payload))
    length_crc = _CRC.pack(masked_crc(length))
    payload_crc = _CRC.pack(masked_crc(payload))
    return b"".join((length, length_crc, payload, payload_crc))


def unframe(record: bytes) -> bytes:
    """Returns the payload of one TFRecord.

    Raises:
      RecordError: If it is shorter than its header says, or a checksum does not match.
    """
    end = HEADER_BYTES + payload_length(record[:HEADER_BYTES])
    if len(record) < end + FOOTER_BYTES:
        raise RecordError(f"the record is truncated: {len(record)} of {end + FOOTER_BYTES} bytes")
    payload = record[HEADER_BYTES:end]
    if _CRC.unpack_from(record, end)[0] != masked_crc(payload):
        raise RecordError("the checksum of the data does not match")
    return payload


def payload_length(header: bytes) -> int:
    """Returns the number of payload bytes that a record header of 12 bytes holds.

    Raises:
      RecordError: If the header is damaged.
    """
    if len(header) < HEADER_BYTES:
        raise RecordError(f"the record header is truncated: {len(header)} of {HEADER_BYTES} bytes")
    if _CRC.unpack_from(header, _LENGTH.size)[0] != masked_crc(header[: _LENGTH.size]):
        raise RecordError("the checksum of the record's length does not match")
    length: int = _LENGTH.unpack_from(header)[0]
    if length > _MAX_PAYLOAD_BYTES:
        raise RecordError(f"the record claims {length} bytes")
    return length


# The messages of TensorFlow's example.proto and feature.proto, so that readers do not have to
# import TensorFlow.
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
    """Serializes a tf.train.Example with one value per feature.

    Args:
      features: Values by name, each bytes or a 64-bit integer.
    """
    example = _Example()
    for name, value in features.items():
        feature = example.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        else:
            feature.int64_list.value.append(value)
    encoded: bytes = example.SerializeToString(deterministic=True)
    return encoded


def decode_example(payload: bytes, names: Iterable[str] | None = None) -> dict[str, FeatureValues]:
    """Returns the values of features of a serialized tf.train.Example.

    Args:
      payload: The serialized Example.
      names: The features to return; None for all. Those that the Example does not have, or that
        are empty, are not in the result.

    Raises:
      RecordError: If the bytes are not an Example.
    """
    try:
        features = _Example.FromString(payload).features.feature
    except DecodeError as error:
        raise RecordError(f"the record is not an Example ({error})") from None
    values: dict[str, FeatureValues] = {}
    for name in features if names is None else names:
        # Looking up a name that is missing would add it.
        if name not in features:
            continue
        feature = features[name]
        for value_list in (feature.bytes_list, feature.int64_list, feature.float_list):
            if value_list.value:
                values[name] = list(value_list.value)
    return values
