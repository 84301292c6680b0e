"""Decodes whole images with training's decoder, and refuses damage that it would cover up with gray pixels."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable

import tensorflow as tf

from hybrid_imagenet.data import decode, images

# libjpeg continues after these, and TensorFlow does not ask it; all that comes out is a line on stderr.
_WARNING = re.compile(
    r"Corrupt JPEG data: (?P<what>.*)|(?P<other>Premature end of JPEG file|Inconsistent progression sequence.*"
    r"|Invalid SOS parameters.*|Application transferred too many scanlines)"
)
_lock = threading.Lock()


def verify(content: bytes) -> None:
    """Decodes an image at full size.

    Raises:
      ValueError: if `images.probe` refuses it, it does not decode, or is a JPEG whose data the decoder had to mend.
    """
    if images.probe(content)[0] != images.JPEG:
        images.picture(content)
        return

    def failure() -> str | None:
        try:
            with tf.device("/cpu:0"):
                tf.io.decode_jpeg(content, channels=3, dct_method="INTEGER_FAST")
        except tf.errors.OpError as error:
            return decode.reason(error)
        return None

    refusal, lines = _with_stderr(failure)
    if refusal is not None:
        raise ValueError(f"the image does not decode ({refusal})")
    warning = _WARNING.search(lines)
    if warning:
        raise ValueError(f"the JPEG is corrupt: {warning['what'] or warning['other']}")


def _with_stderr(function: Callable[[], str | None]) -> tuple[str | None, str]:
    """Calls a function and catches what C code writes to stderr meanwhile; all else goes on to where it went."""
    with _lock, tempfile.TemporaryFile() as caught:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            result = function()
        finally:
            os.dup2(stderr, 2)
            caught.seek(0)
            text = caught.read().decode(errors="replace")
            others = "".join(line for line in text.splitlines(keepends=True) if not _WARNING.search(line))
            os.write(stderr, others.encode())
            os.close(stderr)
    return result, text
