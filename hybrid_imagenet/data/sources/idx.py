"""Reads IDX files, the format of MNIST and Fashion-MNIST, into memory.

The files may be compressed with gzip.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hybrid_imagenet import files
from hybrid_imagenet.data import images, listing
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.data.sources import tfds
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError

FASHION_MNIST = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
"""The classes of Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv 1708.07747, Table 2)."""
_TRAIN_IMAGES = "train-images-idx3-ubyte"
_TRAIN_LABELS = "train-labels-idx1-ubyte"
_FILE_PREFIXES = {"train": "train", "validation": "t10k"}
# The header of an IDX file: two zero bytes, a type code, the number of dimensions, and a big-endian
# uint32 for each dimension.
_MAGIC_BYTES = 4
_UNSIGNED_BYTE_CODE = 0x08
_MAX_DIMENSIONS = 3
# All of a file stays in memory. A small compressed file that claims more than this is an error.
_MAX_UNPACKED_BYTES = 16 << 30


def probe_split(request: DatasetRequest) -> SplitSummary:
    """Finds the two files of a split; for `fashion_mnist` without IDX files asks TFDS."""
    if _uses_tfds(request):
        return tfds.probe_split(request)
    _find_files(request.directory, request.split)
    num_classes = len(FASHION_MNIST) if request.name == "fashion_mnist" else None
    return SplitSummary(f"found in {request.directory}", num_classes)


def open_split(request: DatasetRequest) -> Source:
    """Reads a split."""
    if _uses_tfds(request):
        return tfds.open_split(request)
    class_names = FASHION_MNIST if request.name == "fashion_mnist" else None
    return IdxSource(request.directory, request.split, class_names)


def _uses_tfds(request: DatasetRequest) -> bool:
    """Returns whether to read Fashion-MNIST from TFDS for lack of IDX files."""
    if request.name != "fashion_mnist":
        return False
    candidates = _candidates(request.directory, _TRAIN_IMAGES)
    has_idx_files = bool(request.data_dir) and any(path.is_file() for path in candidates)
    return not has_idx_files


class IdxSource(Source):
    """Gives random access to the images of one split, all held in memory.

    The images are gray, one byte per pixel, and are returned as RGB with three equal channels. The
    files are `train-images-idx3-ubyte` and `t10k-images-idx3-ubyte` of shape [n, height, width],
    and `train-labels-idx1-ubyte` and `t10k-labels-idx1-ubyte` of shape [n], each with or without
    `.gz`.

    Args:
      directory: The directory of the four files.
      split: "train" or "validation".
      class_names: One name per class, in the order of the labels. By default they are read from
        `labels.txt`, one per line; without that file they are numbers.

    Raises:
      UserError: If a file is missing, damaged or in another format.
    """

    def __init__(
        self, directory: Path, split: str, class_names: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self._images_file, labels_file = _find_files(directory, split)
        self.file_names = [self._images_file.name.removesuffix(".gz")]
        self.pixels = self._read(self._images_file)
        self.labels = self._read(labels_file)
        self._check_shapes(labels_file)
        self.num_examples = len(self.pixels)
        if class_names:
            self.class_names = class_names
        else:
            self.class_names, self.notes = _read_class_names(directory)
        self.num_classes = len(self.class_names)
        largest_label = int(self.labels.max())
        if largest_label >= self.num_classes:
            raise UserError(
                f"{labels_file} has label {largest_label} for image {int(self.labels.argmax())},"
                f" which is not one of {self.num_classes} classes. Restore the file."
            )
        _, height, width = self.pixels.shape
        if height == width:
            self.side = height

    def _check_shapes(self, labels_file: Path) -> None:
        """Raises UserError unless there are images, and one label for each."""
        if self.pixels.ndim != 3 or 0 in self.pixels.shape:
            raise UserError(
                f"{self._images_file} holds an array of shape {_shape(self.pixels)}, which is not"
                " images of shape n x height x width. Restore the file."
            )
        if self.labels.shape != self.pixels.shape[:1]:
            raise UserError(
                f"{labels_file} holds {_shape(self.labels)} labels for {len(self.pixels)} images."
                " Restore both files."
            )

    def _read(self, path: Path) -> npt.NDArray[np.uint8]:
        self.reads.add(path.stat().st_size)
        return read(path)

    def stored_labels(self) -> npt.NDArray[np.int64]:
        return self.labels.astype(np.int64)

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Returns an image as a PNG, which preserves its pixels, and its label."""
        from PIL import Image

        picture = Image.fromarray(self.pixels[index])
        return images.encode(picture, "PNG", compress_level=1), int(self.labels[index])

    def read_pixels(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        return _to_rgb(self.pixels[indices]), self.labels[indices].astype(np.int32)

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file of the images and the number of an image in it."""
        return str(self._images_file), index


def _to_rgb(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.repeat(pixels[..., None], 3, axis=-1)


def read(path: Path) -> npt.NDArray[np.uint8]:
    """Reads the array of bytes in an IDX file, which may be compressed with gzip.

    Raises:
      UserError: If the file cannot be read or is not an IDX file of bytes.
    """
    content = _read_unpacked(path)
    if (
        len(content) < _MAGIC_BYTES
        or content[:2] != b"\0\0"
        or content[2] != _UNSIGNED_BYTE_CODE
        or content[3] == 0
    ):
        beginning = content[:_MAGIC_BYTES].hex(" ") or "nothing"
        raise UserError(
            f"{path} is not an IDX file (it begins with {beginning}). Restore the file."
        )
    num_dimensions = content[3]
    if num_dimensions > _MAX_DIMENSIONS:
        raise UserError(
            f"The header of {path} has {num_dimensions} dimensions, but labels have 1 and images 3."
            " Restore the file."
        )
    start = _MAGIC_BYTES + 4 * num_dimensions
    if len(content) < start:
        raise UserError(f"{path} ends inside its header. Restore the file.")
    shape = struct.unpack_from(f">{num_dimensions}I", content, _MAGIC_BYTES)
    if len(content) - start != math.prod(shape):
        raise UserError(
            f"{path} holds {len(content) - start} bytes, but its header says"
            f" {' x '.join(map(str, shape))}. Restore the file."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_unpacked(path: Path) -> bytes:
    """Returns the content of a file, decompressed if its suffix is `.gz`."""
    try:
        content = path.read_bytes()
        if path.suffix != ".gz":
            return content
        # Reading to the end also verifies the checksum of gzip.
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            content = file.read(_MAX_UNPACKED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}). Restore the file.") from None
    if len(content) > _MAX_UNPACKED_BYTES:
        raise UserError(
            f"{path} unpacks to more than {_MAX_UNPACKED_BYTES >> 30} GiB, which would have to fit"
            " into memory. Use a smaller dataset, or another format."
        )
    return content


def _candidates(directory: Path, name: str) -> list[Path]:
    return [directory / name, directory / f"{name}.gz"]


def _find_files(directory: Path, split: str) -> tuple[Path, Path]:
    """Returns the files with the images and the labels of a split."""
    prefix = _FILE_PREFIXES[split]
    images_file = _find_file(directory, f"{prefix}-images-idx3-ubyte")
    labels_file = _find_file(directory, f"{prefix}-labels-idx1-ubyte")
    return images_file, labels_file


def _find_file(directory: Path, name: str) -> Path:
    for path in _candidates(directory, name):
        if path.is_file():
            return path
    raise UserError(
        f"--data_dir={directory} has no {name} or {name}.gz. Set --data_dir to the directory of the"
        " IDX files."
    )


def _read_class_names(directory: Path) -> tuple[tuple[str, ...], tuple[DatasetNote, ...]]:
    """Returns the class names and notes on them.

    The names are read from `labels.txt`. Without it they are numbers up to the largest training
    label.
    """
    largest_label = int(read(_find_file(directory, _TRAIN_LABELS)).max(initial=0))
    labels_file = directory / listing.LABELS_FILE
    if not labels_file.is_file():
        return listing.numbered_class_names(directory, largest_label + 1), ()
    content = files.read_regular(labels_file, files.MAX_TEXT_BYTES)
    class_names = listing.parse_class_list(labels_file, content)
    return class_names, listing.check_labels(labels_file, class_names, largest_label)


def _shape(array: npt.NDArray[np.uint8]) -> str:
    return " x ".join(map(str, array.shape))
