"""Decodes images, and checks their headers first.

Headers are decoded in Python. Pixels are always decoded by TensorFlow, so that commands see what
training sees. It is imported only by the functions that need it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import os
import re
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data import augmentations, image_headers

if TYPE_CHECKING:
    import tensorflow as tf
    from PIL import Image

Result = TypeVar("Result")

# A file of 48 KB may claim 400 million pixels.
MAX_PIXELS = (1 << 28) // 3
"""Pixels of the largest image that is decoded: 256 MiB as RGB."""

# `MAX_PIXELS` of a PNG with 16 bits and transparency are 716 MB without compression. A larger file
# is not an image, and would fill the memory.
MAX_BYTES = 1 << 30
"""Bytes of the largest image file that is read."""


@dataclasses.dataclass(frozen=True)
class Format:
    """Describes an image file format.

    Attributes:
      name: Name for messages.
      suffixes: Suffixes of file names, in lower case.
      operation: The function of TensorFlow's `gen_image_ops` that decodes it; empty if all
        supported versions of TensorFlow decode the format.
      since: The first version of TensorFlow that has the operation.
    """

    name: str
    suffixes: tuple[str, ...]
    operation: str = ""
    since: str = ""


WEBP = Format("WebP", (".webp",), "decode_web_p", "2.20")
JXL = Format("JPEG XL", (".jxl",), "decode_jxl", "2.21")
FORMATS = (
    Format("JPEG", (".jpg", ".jpeg")),
    Format("PNG", (".png",)),
    Format("BMP", (".bmp",)),
    Format("GIF", (".gif",)),
    WEBP,
    JXL,
)
"""The supported formats, for folders, tar files, TFRecords, Parquet files and `predict`."""
SUFFIXES = frozenset(suffix for form in FORMATS for suffix in form.suffixes)
FORMAT_NAMES = ", ".join(form.name for form in FORMATS[:-1]) + f" or {FORMATS[-1].name}"
# Offset, bytes and name of the signatures of formats that are not supported, so that messages can
# name them.
_UNSUPPORTED_SIGNATURES = (
    (0, b"II*\0", "a TIFF"),
    (0, b"MM\0*", "a TIFF"),
    (4, b"ftypavif", "an AVIF"),
    (4, b"ftypheic", "a HEIC"),
    (4, b"ftypheix", "a HEIC"),
    (4, b"ftypmif1", "a HEIF"),
    (4, b"jP  \r\n", "a JPEG 2000"),
)

# The kinds of images, by how TensorFlow decodes them: its JPEG decoder crops and reduces;
# `decode_image` returns RGB for OTHER, but for ANY_CHANNELS only the channels that the image has.
JPEG = 0
OTHER = 1
ANY_CHANNELS = 2
# The reductions at which libjpeg decodes.
RATIOS = (1, 2, 4, 8)

# The following are JPEG markers, see ITU-T T.81, table B.1. A frame header has the image's size.
_START_OF_FRAME = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
# All other markers are followed by a length.
_STANDALONE_MARKERS = frozenset({0x01, *range(0xD0, 0xD8)})
_START_OF_SCAN = 0xDA
_END_OF_IMAGE_BYTES = b"\xff\xd9"
_START_OF_SCAN_BYTES = b"\xff\xda"
# Encoders write 10. A scan of 31 bytes can cost 6 ms, so a file of 2 MB could occupy a thread for
# minutes.
_MAX_SCANS = 100
# libjpeg continues after these errors, and TensorFlow does not ask it about them. The only trace is
# a line on stderr.
_CORRUPT_JPEG_WARNING = re.compile(
    r"Corrupt JPEG data: (?P<detail>.*)|(?P<message>Premature end of JPEG file"
    r"|Inconsistent progression sequence.*"
    r"|Invalid SOS parameters.*|Application transferred too many scanlines)"
)
# Only one thread at a time may redirect stderr.
_stderr_lock = threading.Lock()


class DecodedHeader(NamedTuple):
    """The kind and the size of an encoded image, from its header.

    Attributes:
      kind: JPEG, OTHER or ANY_CHANNELS.
      height: Height in pixels.
      width: Width in pixels.
    """

    kind: int
    height: int
    width: int


def decode_header(data: bytes) -> DecodedHeader:
    """Decodes the header of an encoded image, and checks that the image is complete.

    Bytes after the end of a JPEG or PNG are ignored, as decoders do.

    Raises:
      ValueError: If the image is empty, truncated, animated (WebP, JPEG XL), not of `FORMATS`, has
        more than `MAX_PIXELS`, or has a format that the installed TensorFlow does not decode.
    """
    if data[:2] == b"\xff\xd8":
        return _decode_jpeg_header(data)
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        if not _has_png_end(data):
            raise ValueError("the PNG is truncated: it has no end chunk")
        width, height = struct.unpack_from(">II", data, 16)
    elif data[:4] == b"GIF8" and len(data) >= 10:
        width, height = struct.unpack_from("<HH", data, 6)
    elif data[:2] == b"BM" and len(data) >= 26:
        width, height = struct.unpack_from("<ii", data, 18)
        height = abs(height)
        if not _is_plain_bmp(data):
            raise ValueError(
                "the BMP has a palette of colors, which TensorFlow would decode as gray: store it"
                " as a PNG"
            )
    elif image_headers.is_webp(data):
        _check_decodable(WEBP)
        return _checked_header(ANY_CHANNELS, *image_headers.webp_size(data))
    elif image_headers.is_jxl(data):
        _check_decodable(JXL)
        return _checked_header(ANY_CHANNELS, *image_headers.jxl_size(data))
    elif not data:
        raise ValueError("the image is empty")
    else:
        for offset, signature, name in _UNSUPPORTED_SIGNATURES:
            if data[offset : offset + len(signature)] == signature:
                raise ValueError(
                    f"is {name} image, which is not supported: {image_headers.CONVERT}"
                )
        raise ValueError(f"is not a {FORMAT_NAMES} image (it begins with {data[:4]!r})")
    return _checked_header(OTHER, height, width)


def _decode_jpeg_header(data: bytes) -> DecodedHeader:
    if not _has_jpeg_end(data):
        raise ValueError("the JPEG is truncated: it has no end-of-image marker")
    height, width, has_several_scans = _jpeg_frame(data)
    # Counting takes as long as reading the file, so scans are counted only if there are several.
    num_scans = data.count(_START_OF_SCAN_BYTES) if has_several_scans else 1
    if num_scans > _MAX_SCANS:
        raise ValueError(
            f"the JPEG has {num_scans} scans, each of which takes as long to decode as a whole"
            " image: re-encode it"
        )
    return _checked_header(JPEG, height, width)


def _check_decodable(form: Format) -> None:
    """Raises ValueError if the installed TensorFlow does not decode a format."""
    if not _has_operation(form.operation):
        raise ValueError(
            f"is a {form.name} image, which TensorFlow decodes from version {form.since} on:"
            f" install that version, or {image_headers.CONVERT}"
        )


@functools.cache
def _has_operation(name: str) -> bool:
    """Returns whether TensorFlow has an image operation, without importing TensorFlow.

    The generated Python source of the operations shows it.
    """
    tensorflow = importlib.util.find_spec("tensorflow")
    if tensorflow is None or tensorflow.origin is None:
        return False
    source = Path(tensorflow.origin).parent / "python" / "ops" / "gen_image_ops.py"
    return source.is_file() and f"\ndef {name}(" in source.read_text("utf-8")


def encode(picture: Image.Image, form: str, **options: Any) -> bytes:
    """Encodes an image with Pillow.

    Args:
      picture: The image.
      form: Pillow's name of the format, such as "JPEG" or "PNG".
      **options: Pillow's options for the format.
    """
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def plan_decoding(
    kinds: npt.NDArray[np.int64], windows: augmentations.Windows, side: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Plans how to decode a window of each image for an output of `side` pixels.

    Args:
      kinds: JPEG, OTHER or ANY_CHANNELS, int64 [k].
      windows: (y, x, height, width) in pixels of the stored images, int64 [k, 4].
      side: Pixels of the output.

    Returns:
      (branch, window): the number of kind and reduction for `decode`, int32 [k], and the windows in
      pixels of the reduced images, int32 [k, 4].
    """
    ratios = augmentations.decode_ratios(windows, side)
    branch = kinds * len(RATIOS) + np.log2(ratios)
    return branch.astype(np.int32), (windows // ratios[:, None]).astype(np.int32)


def decode(
    content: tf.Tensor, branch: tf.Tensor, window: tf.Tensor, side: int, *, accurate: bool = False
) -> tf.Tensor:
    """Decodes a window of an image and resizes it bilinearly.

    JPEGs are reduced and cropped during decoding: rows below the window, and blocks to its left and
    right, are not transformed. Other images are reduced as JPEGs are, by the mean of blocks of
    pixels.

    Args:
      content: The encoded image.
      branch: Kind and reduction of the image, from `plan_decoding`.
      window: Window in the reduced image, from `plan_decoding`.
      side: Pixels of the result.
      accurate: Whether JPEGs are decoded with the accurate integer DCT instead of the fast one. The
        results differ by one gray level on average, and by at most ten in sharp images of high
        quality. Evaluation uses the accurate one, as other programs do, so that they see the same
        pixels. Training keeps the fast one, so that an earlier run resumes with the same images.

    Returns:
      The pixels, uint8 [side, side, 3].
    """
    import tensorflow as tf

    dct_method = "INTEGER_ACCURATE" if accurate else "INTEGER_FAST"

    def decode_jpeg(ratio: int) -> tf.Tensor:
        return tf.io.decode_and_crop_jpeg(
            content, window, channels=3, ratio=ratio, dct_method=dct_method
        )

    def decode_other() -> tf.Tensor:
        pixels = tf.io.decode_image(content, channels=3, expand_animations=False)
        return reduce(crop(pixels))

    def decode_any_channels() -> tf.Tensor:
        return reduce(_to_rgb(crop(_decode_any_channels(content))))

    def crop(pixels: tf.Tensor) -> tf.Tensor:
        begin = [ratio * window[0], ratio * window[1], 0]
        return tf.slice(pixels, begin, [ratio * window[2], ratio * window[3], -1])

    def reduce(pixels: tf.Tensor) -> tf.Tensor:
        return tf.cond(ratio == 1, lambda: pixels, lambda: means_of_blocks(pixels))

    def means_of_blocks(pixels: tf.Tensor) -> tf.Tensor:
        means = tf.raw_ops.ResizeArea(images=pixels[None], size=window[2:])[0]
        return tf.cast(means + 0.5, tf.uint8)

    # The decoder of JPEGs takes the reduction as an attribute, so it needs a branch for each. The
    # others share one, because tracing `decode_image` is slow and would delay the first step.
    ratio = tf.gather(RATIOS, branch % len(RATIOS))
    jpeg_branches = [functools.partial(decode_jpeg, jpeg_ratio) for jpeg_ratio in RATIOS]
    # The order is that of the kinds' numbers.
    branches = [*jpeg_branches, decode_other, decode_any_channels]
    is_jpeg = branch < len(RATIOS)
    index = tf.where(is_jpeg, branch, branch // len(RATIOS) + len(RATIOS) - 1)
    return resize(tf.switch_case(index, branches), side)


def _decode_any_channels(content: tf.Tensor) -> tf.Tensor:
    """Decodes an image with the channels that it has, uint8 [h, w, c].

    TensorFlow does not decode a WebP or JPEG XL with transparency to three channels.
    """
    import tensorflow as tf

    return tf.io.decode_image(content, expand_animations=False)


def _to_rgb(pixels: tf.Tensor) -> tf.Tensor:
    """Converts gray or RGB, uint8 [h, w, 1 to 4], to RGB [h, w, 3].

    An alpha channel is ignored.
    """
    import tensorflow as tf

    is_gray = tf.shape(pixels)[-1] < 3
    return tf.gather(pixels, tf.where(is_gray, [0, 0, 0], [0, 1, 2]), axis=-1)


def resize(pixels: tf.Tensor, side: int) -> tf.Tensor:
    """Resizes pixels bilinearly, uint8 [h, w, 3] to [side, side, 3].

    The result is rounded. An image that already has the size is not changed.
    """
    import tensorflow as tf

    resized = tf.raw_ops.ResizeBilinear(
        images=pixels[None], size=(side, side), half_pixel_centers=True
    )[0]
    return tf.ensure_shape(tf.cast(resized + 0.5, tf.uint8), (side, side, 3))


def check_decodes(content: bytes, side: int) -> None:
    """Decodes a whole image as training does.

    Args:
      content: The encoded image.
      side: Pixels of the decoded square.

    Raises:
      ValueError: If `decode_header` does, or if the image does not decode.
    """
    import tensorflow as tf

    header = decode_header(content)
    branch, window = plan_decoding(
        np.array([header.kind]),
        np.array([[0, 0, header.height, header.width]]),
        max(header.height, header.width),
    )
    decode_eagerly(
        lambda: decode(tf.constant(content), tf.constant(branch[0]), tf.constant(window[0]), side)
    )


def decode_whole(content: bytes) -> npt.NDArray[np.uint8]:
    """Decodes a whole image, and finds damage that the decoder would hide.

    The decoder fills damaged parts of a JPEG with gray pixels. JPEGs are decoded with the accurate
    DCT, as in evaluation.

    Args:
      content: The encoded image.

    Returns:
      The pixels as RGB, uint8 [height, width, 3].

    Raises:
      ValueError: If `decode_header` does, if the image does not decode, or if it is a JPEG whose
        data is corrupt.
    """
    kind, height, width = decode_header(content)
    pixels = _decode_whole_jpeg(content) if kind == JPEG else _decode_whole_other(content, kind)
    # Frames of a GIF may be smaller or larger than the header says. Training takes a window of
    # the size in the header.
    if pixels.shape[0] < height or pixels.shape[1] < width:
        raise ValueError(
            f"the image has {pixels.shape[1]} x {pixels.shape[0]} pixels, but its header says"
            f" {width} x {height}"
        )
    return pixels[:height, :width]


def _decode_whole_jpeg(content: bytes) -> npt.NDArray[np.uint8]:
    import tensorflow as tf

    def decode_jpeg() -> tf.Tensor:
        return tf.io.decode_jpeg(content, channels=3, dct_method="INTEGER_ACCURATE")

    pixels, lines = _capture_stderr(lambda: decode_eagerly(decode_jpeg))
    warning = _CORRUPT_JPEG_WARNING.search(lines)
    if warning:
        raise ValueError(f"the JPEG is corrupt: {warning['detail'] or warning['message']}")
    return pixels


def _decode_whole_other(content: bytes, kind: int) -> npt.NDArray[np.uint8]:
    import tensorflow as tf

    if kind == ANY_CHANNELS:
        return decode_eagerly(lambda: _to_rgb(_decode_any_channels(content)))
    return decode_eagerly(lambda: tf.io.decode_image(content, channels=3, expand_animations=False))


def decode_eagerly(decoding: Callable[[], tf.Tensor]) -> npt.NDArray[np.uint8]:
    """Decodes on the host.

    An error that is not about the content, such as one about memory that ran out, is passed on: the
    image may be intact.

    Args:
      decoding: Returns the pixels.

    Raises:
      ValueError: If the content does not decode, with the reason, without the names of
        TensorFlow's operations.
    """
    import tensorflow as tf

    try:
        with tf.device("/cpu:0"):
            pixels: npt.NDArray[np.uint8] = decoding().numpy()
            return pixels
    except tf.errors.InvalidArgumentError as error:
        reason = re.sub(r"\{\{.*?\}\} ?|\[Op:.*", "", str(error.message).splitlines()[0]).strip()
        raise ValueError(f"the image does not decode ({reason})") from None


def _capture_stderr(function: Callable[[], Result]) -> tuple[Result, str]:
    """Calls a function; returns its result and its output to stderr, also from C code.

    Lines other than warnings about corrupt JPEGs are still written to stderr afterwards.
    """
    with _stderr_lock, tempfile.TemporaryFile() as captured:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            result = function()
        finally:
            os.dup2(stderr, 2)
            captured.seek(0)
            text = captured.read().decode(errors="replace")
            other_lines = [
                line
                for line in text.splitlines(keepends=True)
                if not _CORRUPT_JPEG_WARNING.search(line)
            ]
            os.write(stderr, "".join(other_lines).encode())
            os.close(stderr)
    return result, text


def _checked_header(kind: int, height: int, width: int) -> DecodedHeader:
    """Returns a header; raises ValueError for no or too many pixels."""
    if height < 1 or width < 1:
        raise ValueError(f"the image has {height} x {width} pixels")
    if height * width > MAX_PIXELS:
        raise ValueError(
            f"the image has {width} x {height} = {width * height:,} pixels, at most {MAX_PIXELS:,}"
            " are decoded: make it smaller or remove it"
        )
    return DecodedHeader(kind, height, width)


def _has_jpeg_end(data: bytes) -> bool:
    """Returns whether the end-of-image marker follows the pixels.

    A thumbnail before the pixels may have its own end marker, which does not count.
    """
    if _END_OF_IMAGE_BYTES in data[-64:]:
        return True
    for marker, start in _jpeg_segments(data):
        if marker == _START_OF_SCAN:
            return data.find(_END_OF_IMAGE_BYTES, start) >= 0
    return False


def _has_png_end(data: bytes) -> bool:
    chunk = 8
    while chunk + 12 <= len(data):
        if data[chunk + 4 : chunk + 8] == b"IEND":
            return True
        chunk += 12 + int.from_bytes(data[chunk : chunk + 4], "big")
    return False


def _is_plain_bmp(data: bytes) -> bool:
    """Returns whether a BMP has no palette, or one of 256 grays in their order."""
    bits_per_pixel = data[28:30]
    if bits_per_pixel != b"\x08\0":
        return True
    palette_start = 14 + int.from_bytes(data[14:18], "little")
    # A palette entry is blue, green, red and an unused byte.
    palette = data[palette_start : palette_start + 1024]
    colors = b"".join(palette[entry : entry + 3] for entry in range(0, 1024, 4))
    grays = b"".join(bytes((gray, gray, gray)) for gray in range(256))
    return colors == grays


def _jpeg_frame(data: bytes) -> tuple[int, int, bool]:
    """Returns height, width and whether libjpeg reads several scans.

    It does so if the JPEG is progressive, or if its first scan lacks a component.
    """
    frame: tuple[int, int, int] | None = None
    is_progressive = False
    for marker, start in _jpeg_segments(data):
        if marker in _START_OF_FRAME and frame is None:
            frame = struct.unpack_from(">HHB", data, start + 1)
            is_progressive = marker & 3 == 2
        elif marker == _START_OF_SCAN and frame is not None:
            height, width, num_components = frame
            num_scan_components = data[start]
            return height, width, is_progressive or num_scan_components < num_components
    if frame is None:
        raise ValueError("the JPEG has no frame header")
    height, width, _ = frame
    return height, width, True


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields marker and start of the content of each segment before the pixels."""
    position = 2
    # A frame header has 10 bytes from its marker to the number of components.
    end = len(data) - 9
    while position < end:
        if data[position] != 0xFF:
            return
        marker = data[position + 1]
        if marker == 0xFF:
            # Any number of fill bytes may precede a marker.
            position += 1
        elif marker in _STANDALONE_MARKERS:
            position += 2
        else:
            yield marker, position + 4
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
