"""Tests how many images each class has, for each kind of source, and the weights that follow."""

import numpy as np
import pytest

from hybrid_imagenet import config
from hybrid_imagenet.data import class_sizes, datasets
from hybrid_imagenet.data.sources.source import BadRecord
from hybrid_imagenet.data.sources.subset import Subset
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import preflight
from tests.data import support, test_idx


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_folder(directory):
    support.write_folder(directory, "train", support.tiny("train"))
    return datasets.open_source("folder", str(directory), "train")


def open_parquet(directory):
    support.write_parquet(directory, "train", support.tiny("train"))
    return datasets.open_source("parquet", str(directory), "train")


def open_tars(directory):
    directory.mkdir()
    support.write_tars(directory, "train", support.tiny("train"), 5)
    return datasets.open_source("webdataset", str(directory), "train")


def open_records(directory):
    support.write_shards(directory, "train", support.tiny("train"), plain=True)
    return datasets.open_source("tfrecord", str(directory), "train", num_classes=3)


def open_idx(directory):
    return datasets.open_source("fashion_mnist", test_idx.write(directory), "train")


def open_synthetic(directory):
    return datasets.open_source("synthetic", None, "train", num_examples=10, num_classes=4)


OPEN = {
    "folder": open_folder,
    "parquet": open_parquet,
    "webdataset": open_tars,
    "tfrecord": open_records,
    "idx": open_idx,
    "synthetic": open_synthetic,
}


@pytest.mark.parametrize("form", OPEN)
def test_count_classes_equals_the_labels_that_are_read(form, tmp_path):
    source = OPEN[form](tmp_path / "data")
    labels = source.read(np.arange(source.num_examples))[1]
    expected = np.bincount(labels, minlength=source.num_classes)
    assert class_sizes.count_classes(source, form).tolist() == expected.tolist()
    assert (source.stored_labels() is None) == (form == "tfrecord")
    part = Subset(source, np.array([1, 2, 5]))
    expected = np.bincount(labels[[1, 2, 5]], minlength=source.num_classes)
    assert class_sizes.count_classes(part, form).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("label_type", "labels"),
    [
        ("int8", [2, None, 0, -1]),
        ("uint8", [2, None, 0, 255]),
        ("uint32", [2, None, 0, 2**32 - 1]),
        ("uint64", [2, None, 0, 2**64 - 1]),
        ("uint64", [2, None, 0, 2**63]),
    ],
)
def test_count_classes_of_parquet_omits_the_rows_that_read_one_rejects(
    label_type, labels, tmp_path
):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"image": [b"x"] * 4, "label": pyarrow.array(labels, label_type)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    source = datasets.open_source("parquet", str(tmp_path), num_classes=3)
    assert class_sizes.count_classes(source, "parquet").tolist() == [1, 0, 1]
    assert [source.read_one(row)[1] for row in (0, 2)] == [2, 0]
    for row in (1, 3):
        with pytest.raises(BadRecord):
            source.read_one(row)


def test_count_classes_without_stored_labels_omits_bad_records():
    source = support.MemorySource(5, bad=[3])
    assert class_sizes.count_classes(source, "tfrecord").tolist() == [1, 1, 1, 0, 1]


def test_count_classes_of_too_many_records_is_rejected(monkeypatch):
    monkeypatch.setattr(class_sizes, "MAX_READ_EXAMPLES", 4)
    source = support.MemorySource(5)
    message = r"--class_weights=balanced .* --dataset=tfrecord .* Up to 4 images .* there are 5\."
    with pytest.raises(UserError, match=message):
        class_sizes.count_classes(source, "tfrecord")
    assert source.reads == 0


def test_class_weights_of_imagenet_are_rejected_before_anything_is_read():
    resolved = config.resolve(["--class_weights=balanced"])
    with pytest.raises(UserError, match=r"--dataset=imagenet2012 .* there are 1,281,167\."):
        preflight.check(resolved, disk=False)


def test_balanced_weights_equal_the_definition_and_have_a_mean_of_1():
    sizes = np.array([1, 3, 0, 4])
    weights = class_sizes.balanced_weights(sizes)
    assert weights.dtype == np.float32
    # n / (classes with examples x examples of the class), as scikit-learn has it.
    np.testing.assert_allclose(weights, [8 / 3, 8 / 9, 0, 8 / 12], rtol=1e-6)
    assert (sizes * weights).sum() / sizes.sum() == pytest.approx(1)
    line = class_sizes.describe_weights(weights, ("ant", "bee", "cat", "dog"))
    assert line == "class weights: from 0.667 (class dog) to 2.67 (class ant)"
