"""Reads images in IDX files, the form of MNIST and Fashion-MNIST, gzipped or not, and keeps them as
pixels.
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
    *(
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
    ),
)
"""The classes of Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv 1708.07747, Table 2)."""
_PREFIXES = {"train": "train", "validation": "t10k"}
_BYTES = 0x08  # the type code of unsigned bytes
_MOST_DIMENSIONS = 3
_MOST_BYTES = 16 << 30  # of a file that unpacks; all of it stays in memory


def find(request: DatasetRequest) -> SplitSummary:
    """Finds the two files of a split; `fashion_mnist` without IDX files is that of TFDS."""
    if _is_in_tfds(request):
        return tfds.find(request)
    _files(request.directory, request.split)
    return SplitSummary(
        f"found in {request.directory}",
        len(FASHION_MNIST) if request.name == "fashion_mnist" else None,
    )


def open_split(request: DatasetRequest) -> Source:
    """Reads a split."""
    if _is_in_tfds(request):
        return tfds.open_split(request)
    names = FASHION_MNIST if request.name == "fashion_mnist" else None
    return IdxSource(request.directory, request.split, names)


def _is_in_tfds(request: DatasetRequest) -> bool:
    files = _candidates(request.directory, "train-images-idx3-ubyte")
    return request.name == "fashion_mnist" and not (
        request.data_dir and any(path.is_file() for path in files)
    )


class IdxSource(Source):
    """Gives random access to the pixels of one split, held in memory as stored: one byte per pixel.

    The images are `train-images-idx3-ubyte` and `t10k-images-idx3-ubyte` of shape [n, height,
    width], gray, the labels `...-labels-idx1-ubyte`, each with or without `.gz`. Images are handed
    out as RGB with three equal channels.

    Args:
      directory: where the four files lie.
      split: "train" or "validation".
      class_names: names in the order of the labels; None takes `labels.txt` (one a line), or
        numbers.

    Raises:
      UserError: one line that names the file that is missing, damaged or of another form.
    """

    def __init__(
        self, directory: Path, split: str, class_names: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self._file, labels_file = _files(directory, split)
        self.listing = [self._file.name.removesuffix(".gz")]
        self.pixels, self.labels = self._read(self._file), self._read(labels_file)
        if self.pixels.ndim != 3 or 0 in self.pixels.shape:
            raise UserError(
                f"{self._file}: holds an array of {_shape(self.pixels)}, not images; restore the"
                " file"
            )
        if self.labels.shape != self.pixels.shape[:1]:
            raise UserError(
                f"{labels_file}: holds {_shape(self.labels)} labels for {len(self.pixels)} images;"
                " restore both files"
            )
        self.num_examples = len(self.pixels)
        self.class_names, self.notes = (class_names, ()) if class_names else _class_names(directory)
        self.num_classes = len(self.class_names)
        largest = int(self.labels.max())
        if largest >= self.num_classes:
            place = int(self.labels.argmax())
            raise UserError(
                f"{labels_file}: label {largest} of image {place} is not one of {self.num_classes}"
                " classes; restore the file"
            )
        if self.pixels.shape[1] == self.pixels.shape[2]:
            self.side = self.pixels.shape[1]

    def _read(self, path: Path) -> npt.NDArray[np.uint8]:
        self.reads.add(path.stat().st_size)
        return read(path)

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Returns an image as a PNG, which keeps its pixels, and its label."""
        from PIL import Image

        return images.encoded(Image.fromarray(self.pixels[index]), "PNG", compress_level=1), int(
            self.labels[index]
        )

    def read_pixels(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        return _rgb(self.pixels[indices]), self.labels[indices].astype(np.int32)

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file of the images, and the number of this one there."""
        return str(self._file), index


def _rgb(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.repeat(pixels[..., None], 3, axis=-1)


def read(path: Path) -> npt.NDArray[np.uint8]:
    """Reads the array in an IDX file: two zero bytes, a type, the number of dimensions, each
    big-endian, bytes.

    Raises:
      UserError: one line that names the file and what is wrong with it.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:  # checks its CRC at the end
                content = file.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise UserError(
                    f"{path}: unpacks to more than {_MOST_BYTES >> 30} GiB, which is kept in memory"
                )
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}); restore the file") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _BYTES or not content[3]:
        raise UserError(
            f"{path}: is not an IDX file (it begins with {content[:4].hex(' ') or 'nothing'});"
            " restore the file"
        )
    dimensions = content[3]
    if dimensions > _MOST_DIMENSIONS:
        raise UserError(f"{path}: its header has {dimensions} dimensions; labels have 1, images 3")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise UserError(f"{path}: ends inside of its header; restore the file")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - start != math.prod(shape):
        raise UserError(
            f"{path}: holds {len(content) - start} bytes, but its header says"
            f" {' x '.join(map(str, shape))}; restore the file"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _candidates(directory: Path, name: str) -> list[Path]:
    return [directory / f"{name}{suffix}" for suffix in ("", ".gz")]


def _files(directory: Path, split: str) -> tuple[Path, Path]:
    prefix = _PREFIXES[split]
    return _find(directory, f"{prefix}-images-idx3-ubyte"), _find(
        directory, f"{prefix}-labels-idx1-ubyte"
    )


def _find(directory: Path, name: str) -> Path:
    found = next((path for path in _candidates(directory, name) if path.is_file()), None)
    if found is None:
        raise UserError(
            f"--data_dir={directory}: has no {name} or {name}.gz; give the directory of the IDX"
            " files"
        )
    return found


def _class_names(directory: Path) -> tuple[tuple[str, ...], tuple[DatasetNote, ...]]:
    """Returns the classes that `labels.txt` lists, else numbers up to the largest training
    label.
    """
    largest = int(read(_find(directory, "train-labels-idx1-ubyte")).max(initial=0))
    place = directory / listing.LABELS_FILE
    if not place.is_file():
        return listing.numbered_class_names(directory, largest + 1), ()
    names = listing.parse_class_list(place, files.read_regular(place, files.MAX_TEXT_BYTES))
    return names, listing.check_labels(place, names, largest)


def _shape(array: npt.NDArray[np.uint8]) -> str:
    return " x ".join(map(str, array.shape))
