"""Decodes JPEGs with NVIDIA DALI instead of TensorFlow.

DALI decodes the window at full size, on the GPU or the CPU, and resizes it as `images.decode` does.
The pixels are then copied to the host, and back to the GPU as for every batch. Passing the memory
itself (DLPack) would save these copies of about 150 kB per image each, but it is not safe:
TensorFlow numbers the visible GPUs and DALI all GPUs of the machine, and TensorFlow releases such
memory when a step has been queued, not when it has finished.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.data import images
from hybrid_imagenet.errors import UserError

# One pipeline decodes while the other receives or returns a batch.
_NUM_PIPELINES = 2
_MAX_ERROR_CHARACTERS = 200

_log = logging.getLogger(__name__)


def physical_gpu(device: str | None) -> int | None:
    """Returns the machine's number of the GPU behind a TensorFlow device.

    Args:
      device: a device such as "/gpu:0", which numbers the visible GPUs; None for the CPU.

    Returns:
      The number, or None for the CPU.
    """
    if device is None or not device.lower().startswith("/gpu:"):
        return None
    visible_gpus = tf.config.get_visible_devices("GPU")
    # The name is of the form /physical_device:GPU:3.
    name = visible_gpus[int(device[5:])].name
    return int(name.rpartition(":")[2])


def check_installation(gpu: int | None) -> None:
    """Decodes one image to check that DALI works.

    Args:
      gpu: the machine's number of the GPU; None for the CPU.

    Raises:
      UserError: if DALI is not installed, or does not run on this machine.
    """
    try:
        import nvidia.dali  # noqa: F401
    except (ImportError, OSError) as error:
        raise UserError(
            f"--decoder=dali: NVIDIA DALI cannot be loaded ({error}). Install nvidia-dali-cuda120"
            " (the extra dali), or omit --decoder."
        ) from None
    try:
        DaliDecoder(1, 8, 1, gpu).check()
    except Exception as error:
        place = "the CPU" if gpu is None else f"GPU {gpu}"
        raise UserError(
            f"--decoder=dali: NVIDIA DALI does not run on {place} ({_summary(error)}). Omit"
            " --decoder."
        ) from None


class DaliDecoder:
    """Decodes windows of images to squares; safe to use from several threads.

    DALI decodes plain JPEGs (`images.is_plain_jpeg`). TensorFlow decodes everything else, and JPEGs
    that DALI rejects; an image that both reject is a bad record. The pixels of an image do not
    depend on the other images of its batch.
    """

    def __init__(
        self, batch: int, side: int, threads: int, gpu: int | None, *, accurate: bool = False
    ) -> None:
        """Builds DALI's pipelines.

        Args:
          batch: maximum number of images in a batch.
          side: pixels of the squares.
          threads: number of CPU threads.
          gpu: the machine's number of the GPU that decodes; None for the CPU.
          accurate: see `images.decode`.
        """
        self._side = side
        self._accurate = accurate
        self._pipeline_arguments = batch, side, max(1, threads // _NUM_PIPELINES), gpu, accurate
        self._pipelines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(min(_NUM_PIPELINES, threads)):
            self._pipelines.put(_pipeline(*self._pipeline_arguments))
        self._has_warned = False

    def decode(
        self,
        contents: npt.NDArray[np.object_],
        branch: npt.NDArray[np.int32],
        window: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.uint8]:
        """Decodes the windows of a batch.

        Args:
          contents: encoded images, bytes [k].
          branch: kind and reduction of each, from `images.plan_decoding`, int32 [k].
          window: window in the reduced image, from `images.plan_decoding`, int32 [k, 4].

        Returns:
          The squares, uint8 [k, side, side, 3].

        Raises:
          tf.errors.OpError: for an image that does not decode.
          Exception: if DALI fails independently of the images.
        """
        pixels = np.empty((len(contents), self._side, self._side, 3), np.uint8)
        is_plain = np.array([images.is_plain_jpeg(content) for content in contents])
        for_dali = is_plain & (branch < images.OTHER_BRANCH)
        rejected = self._decode_or_reject(
            pixels, np.flatnonzero(for_dali), contents, branch, window
        )
        with tf.device("/cpu:0"):
            for index in (*np.flatnonzero(~for_dali), *rejected):
                pixels[index] = images.decode(
                    tf.constant(contents[index]),
                    tf.constant(branch[index]),
                    tf.constant(window[index]),
                    self._side,
                    accurate=self._accurate,
                ).numpy()
        return pixels

    def check(self) -> None:
        """Decodes a valid image; raises DALI's error if that fails."""
        from PIL import Image

        content = images.encode(Image.new("RGB", (16, 16)), "JPEG")
        window = np.array([[0, 0, 16, 16]], np.int32)
        pixels = np.empty((1, self._side, self._side, 3), np.uint8)
        self._run(pixels, [0], [content], np.zeros(1), window)

    def _decode_or_reject(
        self,
        pixels: npt.NDArray[np.uint8],
        indices: npt.NDArray[np.int64],
        contents: Any,
        branch: Any,
        window: Any,
    ) -> list[int]:
        """Decodes some images of a batch into `pixels`, as far as DALI can.

        Returns:
          The indices of the images that DALI rejects.
        """
        if not len(indices):
            return []
        try:
            self._run(pixels, indices, contents[indices], branch[indices], window[indices])
            return []
        except Exception as error:
            batch_error = error
        # If a valid image fails too, DALI is at fault and not the images: then this raises.
        self.check()
        # A single image fails the whole batch, so each is decoded alone.
        rejected = []
        for index in indices:
            one = slice(index, index + 1)
            try:
                self._run(pixels, one, contents[one], branch[one], window[one])
            except Exception:
                rejected.append(int(index))
        if rejected and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "DALI rejects an image (%s): TensorFlow decodes such images", _summary(batch_error)
            )
        return rejected

    def _run(
        self,
        pixels: npt.NDArray[np.uint8],
        indices: Any,
        contents: Iterable[bytes],
        branch: Any,
        window: Any,
    ) -> None:
        """Decodes images into `pixels[indices]`; raises DALI's error if one fails."""
        ratio = 2 ** np.asarray(branch, np.int32)[:, None]
        inputs = {
            "encoded": [np.frombuffer(content, np.uint8) for content in contents],
            "start": window[:, :2] * ratio,
            "shape": window[:, 2:] * ratio,
            "reduce": ratio[:, 0] > 1,
            "reduced": window[:, 2:].astype(np.float32),
        }
        pipeline = self._pipelines.get()
        try:
            (squares,) = pipeline.run(**inputs)
            pixels[indices] = squares.as_array()
        except Exception:
            # A failed pipeline still holds images, which must not come out later.
            pipeline = _pipeline(*self._pipeline_arguments)
            raise
        finally:
            self._pipelines.put(pipeline)


def _pipeline(batch: int, side: int, threads: int, gpu: int | None, accurate: bool) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(
        batch_size=batch,
        num_threads=threads,
        device_id=gpu,
        # Every run gets its own inputs, so nothing can be prefetched.
        prefetch_queue_depth=1,
        enable_conditionals=True,
    )
    def windows() -> Any:
        # EXIF orientation is ignored as in TensorFlow, because windows refer to the stored image.
        # The hardware decoder is off, so that all images of a batch go through the same decoder.
        # Threads are not pinned to cores, because ranks share them.
        pixels = fn.decoders.image_slice(
            fn.external_source(name="encoded", dtype=types.UINT8, ndim=1),
            start=fn.external_source(name="start", dtype=types.INT32, ndim=1),
            shape=fn.external_source(name="shape", dtype=types.INT32, ndim=1),
            axis_names="HW",
            device="cpu" if gpu is None else "mixed",
            adjust_orientation=False,
            jpeg_fancy_upsampling=True,
            use_fast_idct=not accurate,
            hw_decoder_load=0.0,
            affine=False,
        )
        reduced = fn.external_source(name="reduced", dtype=types.FLOAT, ndim=1)
        if fn.external_source(name="reduce", dtype=types.BOOL, ndim=0):
            # TensorFlow would decode at reduced scale here. Of DALI's filters, this one is the
            # closest to that of libjpeg.
            pixels = fn.resize(pixels, size=reduced, interp_type=types.INTERP_CUBIC, antialias=True)
        pixels = fn.resize(
            pixels, size=[side, side], interp_type=types.INTERP_LINEAR, antialias=False
        )
        return pixels if gpu is None else pixels.cpu()

    pipeline = windows()
    pipeline.build()
    return pipeline


def _summary(error: Exception) -> str:
    """Returns the reason from a DALI error.

    The lines before it say where in DALI's pipeline the error occurred.
    """
    text = str(error)
    details = text.partition("encountered:")[2]
    reasons = [line.strip() for line in details.splitlines() if line.strip()]
    candidates = reasons or text.splitlines() or [type(error).__name__]
    return candidates[0][:_MAX_ERROR_CHARACTERS]
