"""Tests datasets in IDX files, the format of MNIST and Fashion-MNIST."""

import gzip
import struct

import numpy as np
import pytest

from hybrid_imagenet.data import datasets, pipeline
from hybrid_imagenet.data.images import decode_whole
from hybrid_imagenet.data.sources import idx
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder

TRAIN = np.random.default_rng(0).integers(0, 256, (12, 8, 8), np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 10


def idx_bytes(array):
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write(directory, compressed=(), train=TRAIN, labels=LABELS):
    """Writes the four files, the ones in `compressed` with gzip; returns the directory."""
    directory.mkdir(exist_ok=True)
    for prefix, images, classes in (("train", train, labels), ("t10k", train[:4], labels[:4])):
        kinds = {f"images-idx{images.ndim}-ubyte": images, "labels-idx1-ubyte": classes}
        for kind, array in kinds.items():
            name = f"{prefix}-{kind}"
            content = idx_bytes(array)
            if prefix in compressed:
                (directory / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (directory / name).write_bytes(content)
    return str(directory)


def test_idx_source_returns_the_stored_pixels_and_labels(tmp_path):
    folder = write(tmp_path, compressed=("train",))
    for split, count in (("train", 12), ("validation", 4)):
        source = datasets.open_source("fashion_mnist", folder, split)
        assert (source.num_examples, source.num_classes, source.side) == (count, 10, 8)
        assert source.class_names[9] == "Ankle boot"
        pixels, labels = source.read_pixels(np.array([3, 0]))
        assert labels.tolist() == [3, 0]
        for channel in range(3):
            np.testing.assert_array_equal(pixels[..., channel], TRAIN[[3, 0]])
        contents, _ = source.read([3])
        np.testing.assert_array_equal(decode_whole(contents[0]), pixels[0])
        assert source.locate(3)[1] == 3
        assert source.reads.bytes_read > 0


def test_idx_source_has_class_names_from_a_file_or_numbers(tmp_path):
    folder = write(tmp_path, labels=LABELS % 3)
    source = datasets.open_source("idx", folder, "validation")
    assert source.class_names == ("0", "1", "2")
    assert source.read_pixels(np.arange(4))[0].shape == (4, 8, 8, 3)
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    assert datasets.open_source("idx", folder, "train").class_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda content: content[:-3], "its header says 12 x 8 x 8", id="cut"),
        pytest.param(lambda content: content[:9], "ends inside its header", id="cut header"),
        pytest.param(lambda content: b"", "begins with nothing", id="empty"),
        pytest.param(
            lambda content: content[:2] + b"\x0d" + content[3:], "not an IDX file", id="floats"
        ),
        pytest.param(
            lambda content: idx_bytes(TRAIN.ravel()), "which is not images", id="one dimension"
        ),
    ],
)
def test_idx_source_with_a_damaged_file_raises_file_and_remedy(damage, message, tmp_path):
    folder = write(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message) as error:
        datasets.open_source("idx", folder, "train")
    assert str(path) in str(error.value)
    assert "Restore" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("at", [0, -5])
def test_idx_source_with_a_damaged_gzip_file_raises(tmp_path, at):
    folder = write(tmp_path, compressed=("train",))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"train-images-idx3-ubyte\.gz cannot be read .*Restore the file"
    ):
        datasets.open_source("fashion_mnist", folder, "train")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (LABELS[:-1], "holds 11 labels for 12 images"),
        (LABELS + 1, "label 10 for image 9, which is not one of 10 classes"),
    ],
)
def test_idx_source_whose_labels_do_not_fit_images_or_classes_raises(labels, message, tmp_path):
    folder = write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    with pytest.raises(UserError, match=message):
        datasets.open_source("fashion_mnist", folder, "train")


def test_idx_source_without_labels_file_raises_its_name(tmp_path):
    folder = write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(
        UserError, match=r"has no train-labels-idx1-ubyte or train-labels-idx1-ubyte\.gz"
    ):
        datasets.open_source("fashion_mnist", folder, "train")


def test_idx_without_data_dir_raises():
    with pytest.raises(UserError, match=r"--dataset=idx needs .* directory: set --data_dir"):
        datasets.open_source("idx")


def batch_of(source, augmentation):
    order = SampleOrder(source.num_examples, seed=1)
    stream = pipeline.training_batches(
        source, order, Cursor(0, 0), (5, 1), epochs=1, image_size=8, augmentation=augmentation
    )
    return next(iter(stream)), order.rank_slice(Cursor(0, 0), 5)[0]


def test_batches_of_whole_idx_images_are_not_decoded(tmp_path, monkeypatch):
    source = datasets.open_source("fashion_mnist", write(tmp_path), "train")
    monkeypatch.setattr(pipeline.images, "decode", lambda *_: pytest.fail("decoded"))
    element, examples = batch_of(source, "shift")
    np.testing.assert_array_equal(element["image"].numpy()[..., 1], TRAIN[examples])
    np.testing.assert_array_equal(element["label"], LABELS[examples])
    assert element["seed"].shape == (5, 2)
    rows = list(pipeline.evaluation_batches(source, 5, image_size=8, crop_fraction=1.0))
    assert np.concatenate([row["weight"] for row in rows]).sum() == 12
    np.testing.assert_array_equal(
        np.concatenate([row["image"] for row in rows])[:12, ..., 0], TRAIN
    )


def test_batches_of_idx_pixels_equal_those_of_decoded_images(tmp_path):
    source = datasets.open_source("fashion_mnist", write(tmp_path), "train")
    direct, _ = batch_of(source, "digits")
    # Without a common size, images are encoded as PNG and decoded again.
    source.side = None
    decoded, _ = batch_of(source, "digits")
    for key in ("image", "label", "seed"):
        np.testing.assert_array_equal(direct[key], decoded[key])


def test_idx_read_of_a_header_with_too_many_dimensions_raises(tmp_path):
    path = tmp_path / "many"
    path.write_bytes(bytes([0, 0, 8, 200]) + bytes(1000))
    with pytest.raises(UserError, match="200 dimensions"):
        idx.read(path)


def test_idx_read_of_gzip_that_unpacks_to_too_much_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "_MAX_UNPACKED_BYTES", 1000)
    packed = tmp_path / "bomb.gz"
    packed.write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 1, 0, 0]) + bytes(65536)))
    with pytest.raises(UserError, match="unpacks to more than"):
        idx.read(packed)
