"""Tells format and size of an encoded image from its headers, and decodes: with TensorFlow as
training does, or Pillow.

What needs neither imports neither.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data import augmentations, image_headers

if TYPE_CHECKING:
    import tensorflow as tf
    from PIL import Image

MAX_PIXELS = (1 << 28) // 3
"""Pixels of the largest image that is decoded: 256 MiB as RGB. A file of 48 KB may claim 400
million.
"""

MAX_BYTES = 1 << 30
"""Bytes of the largest file of an image that is read: `MAX_PIXELS` of a PNG with 16 bits and
transparency are 716 MB without compression. A larger file is not an image, and would fill the
memory.
"""


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of image files.

    Attributes:
      name: for messages.
      suffixes: of files, in lower case.
      operation: the function of TensorFlow's `gen_image_ops` that decodes it, if some of the
        supported versions of TensorFlow do not have it.
      since: the first version that does.
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
"""The formats that are read, in folders, tar files, TFRecords and Parquet files and by `predict`
alike.
"""
SUFFIXES = frozenset(suffix for form in FORMATS for suffix in form.suffixes)
FORMAT_NAMES = ", ".join(form.name for form in FORMATS[:-1]) + f" or {FORMATS[-1].name}"
# Formats that are not read, by the place and the bytes of their signature, so that messages can
# name them.
_NOT_READ = (
    (0, b"II*\0", "a TIFF"),
    (0, b"MM\0*", "a TIFF"),
    (4, b"ftypavif", "an AVIF"),
    (4, b"ftypheic", "a HEIC"),
    (4, b"ftypheix", "a HEIC"),
    (4, b"ftypmif1", "a HEIF"),
    (4, b"jP  \r\n", "a JPEG 2000"),
)

# How TensorFlow is asked to decode an image: its JPEG decoder crops and reduces; `decode_image`
# gives RGB for OTHER, but for ANY_CHANNELS only the channels that the image has.
JPEG, OTHER, ANY_CHANNELS = 0, 1, 2
_SIZED = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # start-of-frame markers
_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
_HUFFMAN = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended and progressive frames
_ADOBE = 0xEE
_SCAN = 0xDA
_END = b"\xff\xd9"
_SCAN_MARKER = b"\xff\xda"
RATIOS = (1, 2, 4, 8)  # at which libjpeg decodes
OTHER_BRANCH = OTHER * len(
    RATIOS
)  # the first that is not a JPEG's: each kind has a branch for each ratio
# libjpeg continues after these, and TensorFlow does not ask it; all that comes out is a line on
# stderr.
_WARNING = re.compile(
    r"Corrupt JPEG data: (?P<what>.*)|(?P<other>Premature end of JPEG file|Inconsistent progression"
    r" sequence.*"
    r"|Invalid SOS parameters.*|Application transferred too many scanlines)"
)
_stderr = threading.Lock()
# encoders write 10; a scan of 31 bytes can cost 6 ms, so that 2 MB would hold a thread for minutes
_MOST_SCANS = 100


def probe(data: bytes) -> tuple[int, int, int]:
    """Returns the kind (JPEG, OTHER or ANY_CHANNELS), height and width of an encoded image.

    Bytes after the end of a JPEG or PNG are passed over, as decoders do.

    Raises:
      ValueError: if it is empty, truncated, animated (WebP, JPEG XL), of none of `FORMATS`, or has
        more than `MAX_PIXELS`; for a format that the installed TensorFlow does not decode.
    """
    if data[:2] == b"\xff\xd8":
        if not _jpeg_ends(data):
            raise ValueError("the JPEG is truncated: it has no end-of-image marker")
        height, width, several = _jpeg_frame(data)
        if (
            several and (scans := data.count(_SCAN_MARKER)) > _MOST_SCANS
        ):  # to count takes as long as to read
            raise ValueError(
                f"the JPEG has {scans} scans, each of which takes the time of a whole image:"
                " re-encode it"
            )
        return _bounded(JPEG, height, width)
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        if not _png_ends(data):
            raise ValueError("the PNG is truncated: it has no end chunk")
        width, height = struct.unpack_from(">II", data, 16)
    elif data[:4] == b"GIF8" and len(data) >= 10:
        width, height = struct.unpack_from("<HH", data, 6)
    elif data[:2] == b"BM" and len(data) >= 26:
        width, height = struct.unpack_from("<ii", data, 18)
        height = abs(height)
        if not _bmp_is_plain(data):
            raise ValueError(
                "the BMP has a palette of colors, which TensorFlow takes for gray: store it as"
                " a PNG"
            )
    elif image_headers.is_webp(data):
        _check_decodable(WEBP)
        return _bounded(ANY_CHANNELS, *image_headers.webp_size(data))
    elif image_headers.is_jxl(data):
        _check_decodable(JXL)
        return _bounded(ANY_CHANNELS, *image_headers.jxl_size(data))
    elif not data:
        raise ValueError("the image is empty")
    else:
        for at, signature, name in _NOT_READ:
            if data[at : at + len(signature)] == signature:
                raise ValueError(f"is {name} image, which is not read: {image_headers.CONVERT}")
        raise ValueError(f"is not a {FORMAT_NAMES} image (it begins with {data[:4]!r})")
    return _bounded(OTHER, height, width)


def _check_decodable(form: Format) -> None:
    """Raises ValueError if the installed TensorFlow does not decode a format."""
    if not _has_operation(form.operation):
        raise ValueError(
            f"is a {form.name} image, which TensorFlow decodes from version {form.since} on:"
            f" install that version, or {image_headers.CONVERT}"
        )


@functools.cache
def _has_operation(name: str) -> bool:
    """Returns whether TensorFlow has an operation on images, which its generated source shows
    without an import.
    """
    tensorflow = importlib.util.find_spec("tensorflow")
    if tensorflow is None or tensorflow.origin is None:
        return False
    source = Path(tensorflow.origin).parent / "python" / "ops" / "gen_image_ops.py"
    return source.is_file() and f"\ndef {name}(" in source.read_text("utf-8")


def picture(data: bytes) -> Image.Image:
    """Decodes an image of any form that `probe` knows to RGB pixels, by Pillow, or by TensorFlow
    for JPEG XL.

    PNGs of 16 bits keep the upper 8, as TensorFlow's decoder does.

    Raises:
      ValueError: if `probe` refuses it or it does not decode.
    """
    from PIL import Image

    probe(data)
    # Pillow decodes JPEG XL only with a plugin.
    if image_headers.is_jxl(data):
        return Image.fromarray(_run(lambda: _rgb(_decoded_with_its_channels(data))))
    try:
        with Image.open(io.BytesIO(data)) as opened:
            if opened.mode.startswith("I"):  # gray of 16 bits; `convert` would clip it at 255
                return Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8)).convert("RGB")
            return opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image does not decode ({error})") from None


def encoded(picture: Image.Image, form: str, **options: Any) -> bytes:
    """Returns the file of an image, such as a JPEG or a PNG, by Pillow with its options of that
    form.
    """
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def is_plain_jpeg(data: bytes) -> bool:
    """Returns whether a JPEG is of the kind that all decoders read alike: 8 bits, Huffman codes,
    gray or YCbCr.

    Not so: CMYK, and RGB without a color transform, which an Adobe segment or the components' names
    tell.
    """
    for marker, at in _segments(data):
        if (
            marker == _ADOBE
            and data[at : at + 5] == b"Adobe"
            and data[at + 11 : at + 12] == b"\x00"
        ):
            return False
        if marker in _SIZED:
            precision, components = data[at], data[at + 5]
            names = data[at + 6 : at + 6 + 3 * components : 3]
            return (
                marker in _HUFFMAN and precision == 8 and components in (1, 3) and names != b"RGB"
            )
    return False


def branches(
    kinds: npt.NDArray[np.int64], windows: augmentations.Windows, side: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Plans the decoding of each image for an output of `side` pixels.

    Args:
      kinds: JPEG or OTHER, int64 [k].
      windows: (y, x, height, width) in pixels of the stored images, int64 [k, 4].
      side: pixels.

    Returns:
      (branch, window): int32 [k], and the windows in pixels of the reduced images, int32 [k, 4].
    """
    ratios = augmentations.decode_ratio(windows, side)
    branch = kinds * len(RATIOS) + np.log2(ratios)
    return branch.astype(np.int32), (windows // ratios[:, None]).astype(np.int32)


def decode(
    content: tf.Tensor, branch: tf.Tensor, window: tf.Tensor, side: int, *, accurate: bool = False
) -> tf.Tensor:
    """Decodes a window of an image and resizes it bilinearly, uint8 [side, side, 3].

    JPEGs are reduced and cropped while they are decoded: rows below the window and blocks beside it
    are not transformed. Other images are reduced as JPEGs are, by the mean of blocks of pixels.

    Args:
      content: the encoded image.
      branch: how it is decoded, and
      window: what of it, both from `branches`.
      side: pixels of the result.
      accurate: whether JPEGs are decoded by the accurate integer DCT instead of the fast one, which
        differs from it by one grey level on average, and by ten at most in sharp images of high
        quality. Evaluation uses the accurate one so that other programs, which do so too, see the
        same pixels. Training keeps the fast one, so that an earlier run resumes with the images
        that it would have had.
    """
    import tensorflow as tf

    dct_method = "INTEGER_ACCURATE" if accurate else "INTEGER_FAST"

    def jpeg(ratio: int) -> tf.Tensor:
        return tf.io.decode_and_crop_jpeg(
            content, window, channels=3, ratio=ratio, dct_method=dct_method
        )

    def other(ratio: int) -> tf.Tensor:
        return reduce(
            cut(tf.io.decode_image(content, channels=3, expand_animations=False), ratio), ratio
        )

    def any_channels(ratio: int) -> tf.Tensor:
        return reduce(_rgb(cut(_decoded_with_its_channels(content), ratio)), ratio)

    def cut(pixels: tf.Tensor, ratio: int) -> tf.Tensor:
        begin = [ratio * window[0], ratio * window[1], 0]
        return tf.slice(pixels, begin, [ratio * window[2], ratio * window[3], -1])

    def reduce(pixels: tf.Tensor, ratio: int) -> tf.Tensor:
        if ratio == 1:
            return pixels
        return tf.cast(
            tf.raw_ops.ResizeArea(images=pixels[None], size=window[2:])[0] + 0.5, tf.uint8
        )

    # In the order of the kinds' numbers.
    cases = [
        lambda kind=kind, ratio=ratio: kind(ratio)
        for kind in (jpeg, other, any_channels)
        for ratio in RATIOS
    ]
    return resize(tf.switch_case(branch, cases), side)


def _decoded_with_its_channels(content: tf.Tensor) -> tf.Tensor:
    """Decodes an image, uint8 [h, w, c]; a WebP or JPEG XL with transparency does not decode to
    three channels.
    """
    import tensorflow as tf

    return tf.io.decode_image(content, expand_animations=False)


def _rgb(pixels: tf.Tensor) -> tf.Tensor:
    """Returns RGB of gray or RGB with or without alpha, which is ignored: uint8 [h, w, 1 to 4] to
    [h, w, 3].
    """
    import tensorflow as tf

    is_gray = tf.shape(pixels)[-1] < 3
    return tf.gather(pixels, tf.where(is_gray, [0, 0, 0], [0, 1, 2]), axis=-1)


def resize(pixels: tf.Tensor, side: int) -> tf.Tensor:
    """Resizes uint8 [h, w, 3] bilinearly to uint8 [side, side, 3], rounded; an image of that size
    stays as it is.
    """
    import tensorflow as tf

    resized = tf.raw_ops.ResizeBilinear(
        images=pixels[None], size=(side, side), half_pixel_centers=True
    )[0]
    return tf.ensure_shape(tf.cast(resized + 0.5, tf.uint8), (side, side, 3))


def check_decodes(content: bytes, side: int) -> None:
    """Decodes a whole image as training does; raises ValueError if it does not decode or `probe`
    refuses it.
    """
    import tensorflow as tf

    kind, height, width = probe(content)
    branch, window = branches(
        np.array([kind]), np.array([[0, 0, height, width]]), max(height, width)
    )
    _run(lambda: decode(tf.constant(content), tf.constant(branch[0]), tf.constant(window[0]), side))


def verify(content: bytes) -> None:
    """Decodes a whole image, and refuses damage that the decoder would cover up with gray pixels.

    Raises:
      ValueError: if `probe` refuses it, it does not decode, or is a JPEG whose data the decoder had
        to mend.
    """
    if probe(content)[0] != JPEG:
        check_decodes(
            content, 8
        )  # as training does: Pillow decodes kinds of BMP and GIF that TensorFlow refuses
        return
    import tensorflow as tf

    lines = _with_stderr(
        lambda: _run(lambda: tf.io.decode_jpeg(content, channels=3, dct_method="INTEGER_FAST"))
    )
    warning = _WARNING.search(lines)
    if warning:
        raise ValueError(f"the JPEG is corrupt: {warning['what'] or warning['other']}")


def _run(decoding: Callable[[], tf.Tensor]) -> npt.NDArray[np.uint8]:
    """Decodes on the host; raises ValueError with the reason, without the names of TensorFlow's
    operations.
    """
    import tensorflow as tf

    try:
        with tf.device("/cpu:0"):
            pixels: npt.NDArray[np.uint8] = decoding().numpy()
            return pixels
    except tf.errors.OpError as error:
        reason = re.sub(r"\{\{.*?\}\} ?|\[Op:.*", "", str(error.message).splitlines()[0]).strip()
        raise ValueError(f"the image does not decode ({reason})") from None


def _with_stderr(function: Callable[[], object]) -> str:
    """Calls a function; returns what C code writes to stderr meanwhile, of which all but warnings
    is passed on.
    """
    with _stderr, tempfile.TemporaryFile() as caught:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            function()
        finally:
            os.dup2(stderr, 2)
            caught.seek(0)
            text = caught.read().decode(errors="replace")
            others = "".join(
                line for line in text.splitlines(keepends=True) if not _WARNING.search(line)
            )
            os.write(stderr, others.encode())
            os.close(stderr)
    return text


def _bounded(kind: int, height: int, width: int) -> tuple[int, int, int]:
    if height < 1 or width < 1:
        raise ValueError(f"the image has {height} x {width} pixels")
    if height * width > MAX_PIXELS:
        raise ValueError(
            f"the image has {width} x {height} = {width * height:,} pixels, at most {MAX_PIXELS:,}"
            " are decoded: make it smaller or remove it"
        )
    return kind, height, width


def _jpeg_ends(data: bytes) -> bool:
    """Returns whether the end-of-image marker follows the pixels; a thumbnail before them may have
    one of its own.
    """
    if _END in data[-64:]:
        return True
    scan = next((at for marker, at in _segments(data) if marker == _SCAN), None)
    return scan is not None and data.find(_END, scan) >= 0


def _png_ends(data: bytes) -> bool:
    at = 8
    while at + 12 <= len(data):
        if data[at + 4 : at + 8] == b"IEND":
            return True
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return False


def _bmp_is_plain(data: bytes) -> bool:
    """Returns whether a BMP has no palette, or one of 256 grays in their order."""
    palette = 14 + int.from_bytes(data[14:18], "little")
    grays = b"".join(bytes((gray, gray, gray)) for gray in range(256))
    colors = data[palette : palette + 1024]
    return (
        data[28:30] != b"\x08\0"
        or b"".join(colors[at : at + 3] for at in range(0, 1024, 4)) == grays
    )


def _jpeg_frame(data: bytes) -> tuple[int, int, bool]:
    """Returns height, width, and whether libjpeg reads several scans: if progressive, or if one
    lacks a component.
    """
    frame = None
    for marker, at in _segments(data):
        if marker in _SIZED and frame is None:
            frame = (*struct.unpack_from(">HHB", data, at + 1), marker & 3 == 2)
        elif marker == _SCAN and frame is not None:
            height, width, components, progressive = frame
            return height, width, progressive or data[at] < components
    if frame is None:
        raise ValueError("the JPEG has no frame header")
    return (*frame[:2], True)


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields marker and place of the content of each segment of a JPEG before its pixels."""
    at = 2
    end = len(data) - 9
    while at < end:
        if data[at] != 0xFF:
            return
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in _BARE:
            at += 2
        else:
            yield marker, at + 4
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
