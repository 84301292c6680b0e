"""Reads and writes TFRecord files and tf.train.Example messages, without TensorFlow.

A TFRecord is: length (uint64), masked CRC-32C of the length, payload, masked CRC-32C of the payload, all little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

HEADER_BYTES = 12
FOOTER_BYTES = 4
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_MAX_RECORD = 1 << 31
_BLOCK = 1 << 22


class RecordError(ValueError):
    """Bytes that are not the record or message they should be."""


def masked_crc(data: bytes) -> int:
    """Returns the CRC-32C as TFRecords store it: rotated right by 15 bits, plus a constant, modulo 2^32."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Returns one TFRecord with its lengths and checksums."""
    length = _LENGTH.pack(len(payload))
    return b"".join((length, _CRC.pack(masked_crc(length)), payload, _CRC.pack(masked_crc(payload))))


def unframe(record: bytes) -> bytes:
    """Returns the payload of one TFRecord.

    Raises:
      RecordError: if it is shorter than it says, or a checksum does not match.
    """
    length = header_length(record[:HEADER_BYTES])
    if len(record) < HEADER_BYTES + length + FOOTER_BYTES:
        raise RecordError(f"the record is truncated: {len(record)} of {HEADER_BYTES + length + FOOTER_BYTES} bytes")
    payload = record[HEADER_BYTES : HEADER_BYTES + length]
    if _CRC.unpack_from(record, HEADER_BYTES + length)[0] != masked_crc(payload):
        raise RecordError("the checksum of the data does not match")
    return payload


def header_length(header: bytes) -> int:
    """Returns the payload length that a 12-byte record header holds; raises RecordError if it is damaged."""
    if len(header) < HEADER_BYTES:
        raise RecordError(f"the record header is truncated: {len(header)} of {HEADER_BYTES} bytes")
    if _CRC.unpack_from(header, 8)[0] != masked_crc(header[:8]):
        raise RecordError("the checksum of the record's length does not match")
    length: int = _LENGTH.unpack_from(header)[0]
    if length > _MAX_RECORD:
        raise RecordError(f"the record claims {length} bytes")
    return length


class Gap(NamedTuple):
    """A part of a file that holds no readable record: its first byte, the byte after it, and the reason."""

    offset: int
    end: int
    reason: str


def scan(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], tuple[Gap, ...]]:
    """Finds the records of a file by hopping from header to header, and from a damaged one to the next good one.

    Returns:
      (offsets, lengths, gaps): int64 [n] each, where a record begins and its bytes with header and checksums; and the
      parts between them that make no sense.
    """
    offsets: list[int] = []
    lengths: list[int] = []
    gaps: list[Gap] = []
    with path.open("rb", buffering=0) as file:
        handle = file.fileno()
        size = os.fstat(handle).st_size
        offset = 0
        while offset < size:
            try:
                length = _length_at(handle, offset, size)
            except RecordError as error:
                if offsets and not _is_whole(handle, offsets[-1], lengths[-1]):
                    # Bytes are missing or added inside of the record before: the next begins elsewhere than it says.
                    offset = offsets.pop()
                    lengths.pop()
                gaps.append(Gap(offset, _next_record(handle, offset + 1, size), str(error)))
                offset = gaps[-1].end
                continue
            offsets.append(offset)
            lengths.append(length)
            offset += length
    return np.array(offsets, np.int64), np.array(lengths, np.int64), tuple(gaps)


def _length_at(handle: int, offset: int, size: int) -> int:
    """Returns the bytes of the record at an offset of a file of `size` bytes; raises RecordError if there is none."""
    length = HEADER_BYTES + header_length(os.pread(handle, HEADER_BYTES, offset)) + FOOTER_BYTES
    if offset + length > size:
        raise RecordError(f"the record is truncated: {size - offset} of {length} bytes")
    return length


def _is_whole(handle: int, offset: int, length: int) -> bool:
    try:
        unframe(os.pread(handle, length, offset))
    except RecordError:
        return False
    return True


def _next_record(handle: int, start: int, size: int) -> int:
    """Finds the first offset from `start` on at which a whole record with a right header begins; else `size`.

    A length below 2^31 has four zero bytes; where they are, its checksum is compared.
    """
    for block in range(start, size, _BLOCK):
        data = np.frombuffer(os.pread(handle, _BLOCK + HEADER_BYTES - 1, block), np.uint8)
        if len(data) < HEADER_BYTES:
            break
        zeros = np.all(np.lib.stride_tricks.sliding_window_view(data == 0, 4), axis=1)
        count = len(data) - HEADER_BYTES + 1
        for place in np.flatnonzero(zeros[4 : 4 + count] & ~zeros[8 : 8 + count]):  # a file system's holes are skipped
            try:
                _length_at(handle, block + int(place), size)
            except RecordError:
                continue
            return block + int(place)
    return size


def _example_class() -> Any:
    """Returns the message class of tf.train.Example, described here so that no reader has to import TensorFlow."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str | None], repeated: bool = False) -> Any:
        added = file.message_type.add(name=name)
        for title, number, kind, type_name in fields:
            added.field.add(
                name=title,
                number=number,
                type=kind,
                type_name=type_name and f".tensorflow.{type_name}",
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
            )
        return added

    message("BytesList", ("value", 1, field.TYPE_BYTES, None), repeated=True)
    message("FloatList", ("value", 1, field.TYPE_FLOAT, None), repeated=True)
    message("Int64List", ("value", 1, field.TYPE_INT64, None), repeated=True)
    lists = (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List"))
    kinds = [(name, number, field.TYPE_MESSAGE, kind) for number, (name, kind) in enumerate(lists, 1)]
    feature = message("Feature", *kinds)
    feature.oneof_decl.add(name="kind")
    for part in feature.field:
        part.oneof_index = 0
    features = message("Features", ("feature", 1, field.TYPE_MESSAGE, "Features.FeatureEntry"), repeated=True)
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=field.TYPE_MESSAGE, type_name=".tensorflow.Feature", label=field.LABEL_OPTIONAL
    )
    message("Example", ("features", 1, field.TYPE_MESSAGE, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


_Example = _example_class()


def encode_example(features: Mapping[str, bytes | int]) -> bytes:
    """Returns a serialized tf.train.Example with one value per feature: bytes or a 64-bit integer."""
    example = _Example()
    for key, value in features.items():
        if isinstance(value, bytes):
            example.features.feature[key].bytes_list.value.append(value)
        else:
            example.features.feature[key].int64_list.value.append(value)
    encoded: bytes = example.SerializeToString(deterministic=True)
    return encoded


def decode_example(payload: bytes, wanted: Iterable[str]) -> dict[str, bytes | int]:
    """Returns the first value of each wanted bytes or integer feature that a serialized tf.train.Example has.

    Raises:
      RecordError: if the bytes are not an Example.
    """
    try:
        feature = _Example.FromString(payload).features.feature
    except DecodeError as error:
        raise RecordError(f"the record is not an Example ({error})") from None
    values: dict[str, bytes | int] = {}
    for key in wanted:
        if key not in feature:
            continue
        item = feature[key]
        if item.bytes_list.value:
            values[key] = item.bytes_list.value[0]
        elif item.int64_list.value:
            values[key] = item.int64_list.value[0]
    return values
