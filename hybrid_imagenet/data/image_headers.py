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
_FIRST_TRANSPOSED_ORIENTATION = 5
CONVERT = 'convert it, for example with "mogrify -format png FILE" of ImageMagick'


def is_webp(data: bytes) -> bool:
    """Returns whether an image has the signature of a WebP."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def is_jxl(data: bytes) -> bool:
    """Returns whether an image has the signature of a JPEG XL, bare or in a container."""
    return data.startswith((JXL_CODESTREAM, JXL_CONTAINER))


def webp_size(data: bytes) -> tuple[int, int]:
    """Returns height and width of a WebP.

    Raises:
      ValueError: If it is truncated, damaged or animated. Animations are rejected because
        TensorFlow decodes them only with four channels, and TensorFlow 2.21 can crash on them.
    """
    if len(data) < 30 or len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise ValueError("the WebP is truncated: its header states more bytes")
    chunk = data[12:16]
    if chunk == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return height & 0x3FFF, width & 0x3FFF
    if chunk == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if chunk == b"VP8X":
        if data[20] & 0x02:
            raise ValueError(f"the WebP is animated, which is not supported: {CONVERT}")
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    raise ValueError("the WebP has no header of an image")


def jxl_size(data: bytes) -> tuple[int, int]:
    """Returns height and width of a decoded JPEG XL, after its orientation is applied.

    Raises:
      ValueError: If it is damaged or animated.
    """
    header = _jxl_codestream_header(data)
    if not header.startswith(JXL_CODESTREAM):
        raise ValueError("the JPEG XL has no header of an image")
    bits = int.from_bytes(header[2:_JXL_HEADER_BYTES].ljust(_JXL_HEADER_BYTES, b"\0"), "little")

    def read(count: int) -> int:
        """Returns the next `count` bits as a number."""
        nonlocal bits
        value = bits & ((1 << count) - 1)
        bits >>= count
        return value

    height, width = _jxl_size_header(read)
    has_default_metadata = read(1)
    if has_default_metadata:
        return height, width
    has_extra_fields = read(1)
    if not has_extra_fields:
        return height, width
    orientation = 1 + read(3)
    has_intrinsic_size = read(1)
    if has_intrinsic_size:
        _jxl_size_header(read)
    has_preview = read(1)
    if has_preview:
        _skip_jxl_preview_header(read)
    is_animated = read(1)
    if is_animated:
        raise ValueError(f"the JPEG XL is animated, which is not supported: {CONVERT}")
    return (width, height) if orientation >= _FIRST_TRANSPOSED_ORIENTATION else (height, width)


def _jxl_codestream_header(data: bytes) -> bytes:
    """Returns the first bytes of the codestream, which may be split into boxes."""
    if data.startswith(JXL_CODESTREAM):
        return data[:_JXL_HEADER_BYTES]
    codestream = b""
    start = 0
    while start + 16 <= len(data) and len(codestream) < _JXL_HEADER_BYTES:
        size, kind = struct.unpack_from(">I4s", data, start)
        content = start + 8
        # A size of 1 means that the size follows in 64 bits, and 0 that the box is the last.
        if size == 1:
            size = int.from_bytes(data[content : content + 8], "big")
            content += 8
        end = start + size if size else len(data)
        if end < content:
            break
        if kind == b"jxlc":
            codestream += data[content : min(end, content + _JXL_HEADER_BYTES)]
        elif kind == b"jxlp":
            # The number of the part comes before its bytes.
            content += 4
            codestream += data[content : min(end, content + _JXL_HEADER_BYTES)]
        start = end
    return codestream


def _jxl_size_header(read: Callable[[int], int]) -> tuple[int, int]:
    is_multiple_of_8 = read(1)

    def side() -> int:
        if is_multiple_of_8:
            return 8 * (1 + read(5))
        return 1 + read((9, 13, 18, 30)[read(2)])

    height = side()
    ratio_code = read(3)
    if ratio_code == 0:
        return height, side()
    numerator, denominator = _JXL_WIDTH_TO_HEIGHT[ratio_code - 1]
    return height, height * numerator // denominator


def _skip_jxl_preview_header(read: Callable[[int], int]) -> None:
    """Reads the size of a preview; it is encoded differently from the image's size."""
    is_multiple_of_8 = read(1)
    bits_of_side = (0, 0, 5, 9) if is_multiple_of_8 else (6, 8, 10, 12)
    read(bits_of_side[read(2)])
    ratio_code = read(3)
    if ratio_code == 0:
        # Without a ratio, the width follows.
        read(bits_of_side[read(2)])
