"""Derives a harder dataset from Fashion-MNIST: two garments in one image, 100 classes.

    python -m studies.garment_pairs --data_dir=DIR --to=OUT [--seed=0] [--training_images=60000]

DIR holds the four IDX files of Fashion-MNIST. OUT gets four IDX files and `labels.txt`, which the
training program reads with `--dataset=idx --data_dir=OUT`.

Small networks soon reach 90 % on Fashion-MNIST itself, where methods hardly differ. Here an image
of 32 x 32 pixels shows two garments on a noisy field, one above the other, and the class is the
ordered pair: 10 x 10 classes. Training images are made from Fashion-MNIST's training images only,
and test images from its test images.

- **Classes.** Each pair has the same number of images. A garment is used at most once above and
  once below.
- **Places.** A garment is scaled from 28 to 18 pixels. The upper one fills rows 0 to 17, the lower
  one rows 14 to 31, where it covers the upper one. Each is at a random horizontal position. The
  order is vertical because `--augmentation=shift` mirrors images left to right, which must not
  change the class.
- **Field.** A random gray level for each image, with noise for each pixel.

The same seed gives the same bytes on every machine: all arithmetic is exact, and the random numbers
come from NumPy's PCG64. The command prints the SHA-256 of each file, so that two machines can be
compared. NumPy does not promise that a later version draws the same numbers;
`tests/studies/test_garment_pairs.py` fails if they change.

From the published files, seed 0 and 60,000 training images give `train-images-idx3-ubyte` with the
SHA-256 b28b85b25f41b1e873de65697639aa4126ce98ae86d09bedbba9198dea6442fa.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import shutil
import struct
import sys
import tempfile
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybrid_imagenet import files
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.data import listing
from hybrid_imagenet.data.sources.idx import FASHION_MNIST, IdxSource
from hybrid_imagenet.errors import UserError

GARMENTS = len(FASHION_MNIST)
CLASSES = GARMENTS * GARMENTS
SOURCE_SIDE = 28
GARMENT_SIDE = 18
SIDE = 32
TRAINING_IMAGES = 60_000

# The gray level of a field is below 120 and its noise below 40, so their sum fits into a byte.
FIELD_LEVELS = 120
NOISE_LEVELS = 40
# Fashion-MNIST's own background is 0, and scaling blurs the edge of a garment. Darker pixels than
# this show the field.
LARGEST_BACKGROUND_PIXEL = 8

# The file names of IDX datasets begin with these, by split. The number keeps the random numbers of
# the splits apart, so that the test images do not depend on how many training images are made.
_SPLITS = {"train": ("train", 0), "validation": ("t10k", 1)}

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.uint8]


def class_names() -> list[str]:
    """Returns the name of each class in the order of the labels, such as "Dress above Bag"."""
    return [f"{upper} above {lower}" for upper in FASHION_MNIST for lower in FASHION_MNIST]


def shrink(images: Images) -> Images:
    """Scales images [n, 28, 28] to [n, 18, 18].

    Each new pixel is the rounded mean of the area that it covers.
    """
    # In units of 1/18 of a pixel, an old pixel is 18 long and a new one 28.
    old_edges = GARMENT_SIDE * np.arange(SOURCE_SIDE + 1)
    new_edges = SOURCE_SIDE * np.arange(GARMENT_SIDE + 1)
    ends = np.minimum(new_edges[1:, None], old_edges[None, 1:])
    starts = np.maximum(new_edges[:-1, None], old_edges[None, :-1])
    overlap = np.maximum(ends - starts, 0)
    # All overlaps are even. Halved, they sum to 14 in each row, and every sum below stays under 2
    # ** 24. So float32, whose matrix product is fast, computes whole numbers exactly.
    weights = (overlap // 2).astype(np.float32)
    area = int(weights[0].sum()) ** 2
    sums = weights @ images.astype(np.float32) @ weights.T
    return ((sums.astype(np.int32) + area // 2) // area).astype(np.uint8)


def choose_pairs(
    labels: Labels, images_per_pair: int, generator: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Chooses which garments are shown together.

    Args:
      labels: The garment in each source image, [n].
      images_per_pair: Images of each ordered pair.
      generator: Source of the random order.

    Returns:
      Numbers of the source images shown above and below, each [100 * images_per_pair], class by
      class. No number occurs twice in one of them.
    """
    shape = (GARMENTS, images_per_pair)
    count = GARMENTS * images_per_pair
    by_garment = [np.flatnonzero(labels == garment) for garment in range(GARMENTS)]
    upper = np.stack(
        [generator.permutation(numbers)[:count].reshape(shape) for numbers in by_garment]
    )
    lower = np.stack(
        [generator.permutation(numbers)[:count].reshape(shape) for numbers in by_garment]
    )
    # `upper` is [upper garment, lower garment, image], `lower` the other way round.
    return upper.ravel(), lower.swapaxes(0, 1).ravel()


def compose(
    images: Images, labels: Labels, images_per_pair: int, generator: np.random.Generator
) -> tuple[Images, Labels]:
    """Makes one split.

    Args:
      images: Images of Fashion-MNIST, [n, 28, 28].
      labels: The garment in each, [n].
      images_per_pair: Images of each ordered pair.
      generator: Source of all random numbers.

    Returns:
      Images [100 * images_per_pair, 32, 32] and their labels, 10 * upper garment + lower garment,
      in random order.
    """
    upper, lower = choose_pairs(labels, images_per_pair, generator)
    count = len(upper)
    order = generator.permutation(count)
    upper = upper[order]
    lower = lower[order]
    garments = shrink(images)
    levels = generator.integers(0, FIELD_LEVELS, (count, 1, 1), dtype=np.uint8)
    noise = generator.integers(0, NOISE_LEVELS, (count, SIDE, SIDE), dtype=np.uint8)
    pictures = levels + noise
    columns = generator.integers(0, SIDE - GARMENT_SIDE, (count, 2), endpoint=True, dtype=np.uint8)
    for number, picture in enumerate(pictures):
        left_of_upper, left_of_lower = columns[number].tolist()
        _paste(picture, garments[upper[number]], 0, left_of_upper)
        _paste(picture, garments[lower[number]], SIDE - GARMENT_SIDE, left_of_lower)
    return pictures, GARMENTS * labels[upper] + labels[lower]


def _paste(picture: Images, garment: Images, top: int, left: int) -> None:
    """Draws a garment [18, 18] on a picture [32, 32], in place, and keeps the field around it."""
    window = picture[top : top + GARMENT_SIDE, left : left + GARMENT_SIDE]
    np.copyto(window, garment, where=garment > LARGEST_BACKGROUND_PIXEL)


def generate(
    source: IdxSource, split: str, seed: int, training_images: int = TRAINING_IMAGES
) -> tuple[Images, Labels]:
    """Makes the images and labels of a split from those of the same split of Fashion-MNIST.

    Args:
      source: The split of Fashion-MNIST.
      split: "train" or "validation".
      seed: Seed of the random numbers.
      training_images: Training images of the training split, a multiple of 100. The other split is
        as large as its source allows.

    Raises:
      UserError: If the source has another form, or too few images.
    """
    if source.pixels.shape[1:] != (SOURCE_SIDE, SOURCE_SIDE):
        height, width = source.pixels.shape[1:]
        raise UserError(
            f"{source.locate(0)[0]} has images of {height} x {width} pixels, but those of"
            f" Fashion-MNIST have {SOURCE_SIDE} x {SOURCE_SIDE}. Set --data_dir to the directory of"
            " its four files."
        )
    most_per_pair = int(np.bincount(source.labels, minlength=GARMENTS).min()) // GARMENTS
    per_pair = most_per_pair
    if split == "train":
        per_pair = training_images // CLASSES
    if not 0 < per_pair <= most_per_pair:
        raise UserError(
            f"{source.locate(0)[0]} is enough for {CLASSES * most_per_pair} images with equally"
            f" many of each class, not for {max(per_pair, 1) * CLASSES}. Set --data_dir to the"
            " files of the whole dataset, or --training_images to a smaller number."
        )
    generator = np.random.Generator(np.random.PCG64([seed, _SPLITS[split][1]]))
    return compose(source.pixels, source.labels, per_pair, generator)


def encode_idx(array: npt.NDArray[np.uint8]) -> bytes:
    """Returns an array of bytes in the form of an IDX file."""
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write(
    data_dir: pathlib.Path, to: pathlib.Path, seed: int, training_images: int
) -> dict[str, str]:
    """Writes the dataset into a new directory; returns the SHA-256 of each file by name.

    Nothing is at `to` before all files are complete.

    Raises:
      UserError: If the files of Fashion-MNIST cannot be used, or the directory exists and is not
        empty.
      OSError: If the dataset cannot be written.
    """
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UserError(
            f"--to={to} exists and is not an empty directory. Choose a new one, or remove it."
        )
    sources = {split: IdxSource(data_dir, split, FASHION_MNIST) for split in _SPLITS}
    contents: dict[str, bytes] = {}
    for split, (prefix, _) in _SPLITS.items():
        images, labels = generate(sources[split], split, seed, training_images)
        contents[f"{prefix}-images-idx3-ubyte"] = encode_idx(images)
        contents[f"{prefix}-labels-idx1-ubyte"] = encode_idx(labels)
    contents[listing.LABELS_FILE] = "".join(f"{name}\n" for name in class_names()).encode()
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = pathlib.Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}-"))
    try:
        for name, content in contents.items():
            (unfinished / name).write_bytes(content)
        unfinished.chmod(0o755)  # mkdtemp makes it private
        unfinished.replace(to)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _multiple_of_classes(text: str) -> int:
    count = command_line.positive_int(text)
    if count % CLASSES:
        raise argparse.ArgumentTypeError(
            f"{text} is not a multiple of {CLASSES}, the number of classes"
        )
    return int(count)


def main(arguments: Sequence[str]) -> None:
    """Writes the dataset and prints the digests of its files.

    Raises:
      UserError: One line that says what is wrong and what to do.
    """
    parser = command_line.Parser(
        prog="python -m studies.garment_pairs",
        description=(
            "Derives a dataset of 100 classes from Fashion-MNIST: two garments in each image."
        ),
    )
    parser.add_argument(
        "--data_dir",
        metavar="DIR",
        required=True,
        help="directory of the four IDX files of Fashion-MNIST",
    )
    parser.add_argument("--to", metavar="OUT", required=True, help="new directory for the dataset")
    parser.add_argument(
        "--seed",
        type=command_line.non_negative_int,
        default=0,
        help="seed of all random choices (%(default)s)",
    )
    parser.add_argument(
        "--training_images",
        type=_multiple_of_classes,
        default=TRAINING_IMAGES,
        help=f"number of training images, a multiple of {CLASSES} (%(default)s)",
    )
    options = parser.parse_args(arguments)
    to = files.output_path("--to", options.to)
    try:
        digests = write(
            files.expand_home(options.data_dir), to, options.seed, options.training_images
        )
    except OSError as error:
        raise UserError(
            f"{error.filename or to}: {error.strerror}. Choose a directory that can be written."
        ) from None
    for name, digest in digests.items():
        print(f"{digest}  {to / name}")
    print(f"next: python -m studies full_form --ranks=1 -- --data_dir={to}")


if __name__ == "__main__":
    sys.exit(command_line.run_command(main, sys.argv[1:]))
