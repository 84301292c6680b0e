"""Decodes with NVIDIA DALI in place of TensorFlow's JPEG decoder; `pipeline` still chooses images
and windows.

DALI decodes the window at full size, on the GPU or the CPU, and resizes it as `images.decode` does.
Finished pixels leave the GPU once and go back as every batch does. Handing over the memory itself
(DLPack) would save that, about 150 kB per image each way, but TensorFlow numbers the GPUs that it
was shown and DALI the machine's, and TensorFlow lets go of such memory when a step has been queued,
not when it is done.
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

_SLOTS = 2  # pipelines: one decodes while the other takes in a batch or gives one out

_log = logging.getLogger(__name__)


def gpu_of(device: str | None) -> int | None:
    """Returns the machine's number of the GPU behind a TensorFlow device such as "/gpu:0"; None for
    the CPU.
    """
    if device is None or not device.lower().startswith("/gpu:"):
        return None
    name = tf.config.get_visible_devices("GPU")[
        int(device[5:])
    ].name  # such as /physical_device:GPU:3
    return int(name.rpartition(":")[2])


def check(gpu: int | None) -> None:
    """Decodes one image.

    Raises:
      UserError: if DALI is not installed, or does not run on this machine.
    """
    try:
        import nvidia.dali  # noqa: F401
    except (ImportError, OSError) as error:
        raise UserError(
            f"--decoder=dali: NVIDIA DALI cannot be loaded ({error}): install nvidia-dali-cuda120"
            " (the extra dali), or omit --decoder"
        ) from None
    try:
        Decoder(1, 8, 1, gpu).check()
    except Exception as error:
        place = "the CPU" if gpu is None else f"GPU {gpu}"
        raise UserError(
            f"--decoder=dali: NVIDIA DALI does not run on {place} ({_summary(error)}): omit"
            " --decoder"
        ) from None


class Decoder:
    """Decodes windows of images to squares; safe to use from several threads.

    Plain JPEGs (`images.is_plain_jpeg`) go to DALI, all else to TensorFlow, and so does a JPEG that
    DALI refuses: what TensorFlow refuses too is a bad record. Which images share a batch does not
    matter to the pixels.

    Args:
      batch: images in a batch, at most.
      side: pixels of the squares.
      threads: of the CPU.
      gpu: the machine's number of the GPU that decodes; None for the CPU.
      accurate: see `images.decode`.
    """

    def __init__(
        self, batch: int, side: int, threads: int, gpu: int | None, *, accurate: bool = False
    ) -> None:
        self._side = side
        self._accurate = accurate
        self._settings = batch, side, max(1, threads // _SLOTS), gpu, accurate
        self._pipelines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(min(_SLOTS, threads)):
            self._pipelines.put(_pipeline(*self._settings))
        self._told = False

    def decode(
        self,
        contents: npt.NDArray[np.object_],
        branch: npt.NDArray[np.int32],
        window: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.uint8]:
        """Returns the windows of a batch as squares, uint8 [k, side, side, 3].

        Args:
          contents: encoded images, bytes [k].
          branch, window: how each is decoded, from `images.branches`: int32 [k] and [k, 4].

        Raises:
          tf.errors.OpError: for an image that does not decode.
          Exception: if DALI fails whatever the image is.
        """
        pixels = np.empty((len(contents), self._side, self._side, 3), np.uint8)
        plain = np.array([images.is_plain_jpeg(content) for content in contents]) & (
            branch < images.OTHER_BRANCH
        )
        places = np.flatnonzero(plain)
        refused = self._refused(pixels, places, contents, branch, window)
        with tf.device("/cpu:0"):
            for place in (*np.flatnonzero(~plain), *refused):
                pixels[place] = images.decode(
                    tf.constant(contents[place]),
                    tf.constant(branch[place]),
                    tf.constant(window[place]),
                    self._side,
                    accurate=self._accurate,
                ).numpy()
        return pixels

    def check(self) -> None:
        """Decodes an image that is good; raises what DALI raises if that fails."""
        from PIL import Image

        content = images.encoded(Image.new("RGB", (16, 16)), "JPEG")
        window = np.array([[0, 0, 16, 16]], np.int32)
        self._run(
            np.empty((1, self._side, self._side, 3), np.uint8), [0], [content], np.zeros(1), window
        )

    def _refused(
        self,
        pixels: npt.NDArray[np.uint8],
        places: npt.NDArray[np.int64],
        contents: Any,
        branch: Any,
        window: Any,
    ) -> list[int]:
        """Fills in the pixels of some images; returns the places of those that DALI does not
        decode.
        """
        if not len(places):
            return []
        try:
            self._run(pixels, places, contents[places], branch[places], window[places])
            return []
        except Exception as error:
            reason = error
        self.check()  # raises if the images are not to blame
        refused = []
        for place in places:  # each alone: one image fails the batch
            own = slice(place, place + 1)
            try:
                self._run(pixels, own, contents[own], branch[own], window[own])
            except Exception:
                refused.append(int(place))
        if refused and not self._told:
            self._told = True
            _log.warning(
                "DALI refuses an image (%s): such images are left to TensorFlow", _summary(reason)
            )
        return refused

    def _run(
        self,
        pixels: npt.NDArray[np.uint8],
        places: Any,
        contents: Iterable[bytes],
        branch: Any,
        window: Any,
    ) -> None:
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
            pixels[places] = squares.as_array()
        except Exception:
            pipeline = _pipeline(
                *self._settings
            )  # what is left in one that failed must not come out later
            raise
        finally:
            self._pipelines.put(pipeline)


def _pipeline(batch: int, side: int, threads: int, gpu: int | None, accurate: bool) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(
        batch_size=batch,
        num_threads=threads,
        device_id=gpu,
        prefetch_queue_depth=1,  # inputs are handed to each run
        enable_conditionals=True,
    )
    def windows() -> Any:
        # EXIF orientation is ignored, as TensorFlow does: windows lie in the stored image. One kind
        # of decoder for all images, so that the place in a batch does not matter; threads are not
        # tied to cores, which ranks share.
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
            # Where TensorFlow would decode at reduced scale: nearest to libjpeg's of DALI's
            # filters.
            pixels = fn.resize(pixels, size=reduced, interp_type=types.INTERP_CUBIC, antialias=True)
        pixels = fn.resize(
            pixels, size=[side, side], interp_type=types.INTERP_LINEAR, antialias=False
        )
        return pixels if gpu is None else pixels.cpu()

    pipeline = windows()
    pipeline.build()
    return pipeline


def _summary(error: Exception) -> str:
    """Returns the reason out of DALI's report, whose first lines tell where in the pipeline it
    arose.
    """
    lines = [
        line.strip()
        for line in str(error).partition("encountered:")[2].splitlines()
        if line.strip()
    ]
    return (lines or str(error).splitlines() or [type(error).__name__])[0][:200]
