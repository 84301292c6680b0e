"""Reads the size of WebP and JPEG XL images from their headers, without a decoder.

References:
  WebP container: https://developers.google.com/speed/webp/docs/riff_container and RFC 6386, section
  9.1 (VP8).
  JPEG XL: ISO/IEC 18181-1, annex D (image header), and 18181-2 (container).
"""

from __future__ import annotations

import struct
from collections.abc import Callable

JXL_CODESTREAM = b"\xff\x0a"
JXL_CONTAINER = b"\x00\x00\x00\x0cJXL \r\n\x87\n"
# The size and the flags of a JPEG XL image need at most 220 bits.
_JXL_HEADER_BYTES = 64
_JXL_WIDTH_TO_HEIGHT = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))
# From this orientation on, the decoder swaps rows and columns.
_FIRST_SWAPPED = 5
CONVERT = 'convert it, for example with "mogrify -format png FILE" of ImageMagick'


def is_webp(data: bytes) -> bool:
    """Returns whether an image begins as a WebP does."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def is_jxl(data: bytes) -> bool:
    """Returns whether an image begins as a JPEG XL does, bare or in a container."""
    return data.startswith((JXL_CODESTREAM, JXL_CONTAINER))


def webp_size(data: bytes) -> tuple[int, int]:
    """Returns height and width of a WebP.

    Raises:
      ValueError: if it is truncated, damaged or animated. TensorFlow decodes an animation only with
        four channels, and TensorFlow 2.21 can crash on it.
    """
    if len(data) < 30 or len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise ValueError("the WebP is truncated: its header announces more bytes")
    chunk = data[12:16]
    if chunk == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return height & 0x3FFF, width & 0x3FFF
    if chunk == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if chunk == b"VP8X":
        if data[20] & 0x02:
            raise ValueError(f"the WebP is animated, which is not read: {CONVERT}")
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    raise ValueError("the WebP has no header of an image")


def jxl_size(data: bytes) -> tuple[int, int]:
    """Returns height and width of a JPEG XL as it is decoded, which is after its orientation.

    Raises:
      ValueError: if it is damaged or animated.
    """
    header = _jxl_codestream(data)
    if not header.startswith(JXL_CODESTREAM):
        raise ValueError("the JPEG XL has no header of an image")
    bits = int.from_bytes(header[2:_JXL_HEADER_BYTES].ljust(_JXL_HEADER_BYTES, b"\0"), "little")

    def read(count: int) -> int:
        """Returns the next bits as a number."""
        nonlocal bits
        value = bits & ((1 << count) - 1)
        bits >>= count
        return value

    height, width = _jxl_size_header(read)
    if read(1):  # all metadata have their default values
        return height, width
    if not read(1):  # no extra fields
        return height, width
    orientation = 1 + read(3)
    if read(1):  # an intrinsic size
        _jxl_size_header(read)
    if read(1):
        _skip_jxl_preview_header(read)
    if read(1):
        raise ValueError(f"the JPEG XL is animated, which is not read: {CONVERT}")
    return (width, height) if orientation >= _FIRST_SWAPPED else (height, width)


def _jxl_codestream(data: bytes) -> bytes:
    """Returns the beginning of the codestream, which a container may split into parts."""
    if data.startswith(JXL_CODESTREAM):
        return data[:_JXL_HEADER_BYTES]
    codestream = b""
    at = 0
    while at + 16 <= len(data) and len(codestream) < _JXL_HEADER_BYTES:
        size, kind = struct.unpack_from(">I4s", data, at)
        begin = at + 8
        if size == 1:  # the size follows in 64 bits
            size = int.from_bytes(data[begin : begin + 8], "big")
            begin += 8
        end = at + size if size else len(data)
        if end < begin:
            break
        if kind == b"jxlc":
            codestream += data[begin : min(end, begin + _JXL_HEADER_BYTES)]
        elif kind == b"jxlp":  # the number of the part comes first
            codestream += data[begin + 4 : min(end, begin + 4 + _JXL_HEADER_BYTES)]
        at = end
    return codestream


def _jxl_size_header(read: Callable[[int], int]) -> tuple[int, int]:
    in_eights = read(1)

    def side() -> int:
        if in_eights:
            return 8 * (1 + read(5))
        return 1 + read((9, 13, 18, 30)[read(2)])

    height = side()
    ratio = read(3)
    if not ratio:
        return height, side()
    numerator, denominator = _JXL_WIDTH_TO_HEIGHT[ratio - 1]
    return height, height * numerator // denominator


def _skip_jxl_preview_header(read: Callable[[int], int]) -> None:
    """Reads the size of a preview, which is written in another way than that of the image."""
    bits_of_side = (0, 0, 5, 9) if read(1) else (6, 8, 10, 12)
    read(bits_of_side[read(2)])
    if not read(3):  # no ratio: the width follows
        read(bits_of_side[read(2)])
