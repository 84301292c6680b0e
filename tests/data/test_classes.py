"""Tests class lists next to the shards, and class names in files and splits."""

import json
import struct

import numpy as np
import pytest

from hybrid_imagenet.data import datasets, listing
from hybrid_imagenet.data.sources.source import BadRecord
from hybrid_imagenet.errors import UserError
from tests.data import support, test_idx, test_webdataset
from tests.data.test_sources import cache, make  # noqa: F401


def write_numbered_classes(name, directory):
    """Writes a dataset with the labels 0, 1 and 2, whose classes a file may list."""
    if name == "webdataset":
        return test_webdataset.write(directory)
    if name == "idx":
        test_idx.write(directory, labels=test_idx.LABELS % 3)
    else:
        for split in datasets.SPLITS:
            support.write_shards(directory, split, support.tiny(split))
    return directory


@pytest.mark.parametrize("name", ["webdataset", "idx"])
def test_class_list_is_compared_with_the_labels(name, tmp_path):
    directory = write_numbered_classes(name, tmp_path / "set")
    class_list = directory / "labels.txt"

    def open_with_classes(*lines):
        class_list.write_text("\n".join(lines) + "\n")
        return datasets.open_source(name, str(directory))

    assert open_with_classes("cat", "dog", "owl").notes == ()
    with pytest.raises(
        UserError, match=r"labels.txt lists 2 classes, but a training image has the label 2"
    ):
        open_with_classes("cat", "dog")
    with pytest.raises(UserError, match=r"labels.txt lists 'cat' on 2 of 4 lines"):
        open_with_classes("cat", "dog", "owl", "cat")
    more = open_with_classes("cat", "dog", "owl", "eel")
    assert more.class_names == ("cat", "dog", "owl", "eel")
    (note,) = more.notes
    assert "lists 4 classes, but no training image has a label above 2" in note.text
    assert not note.fault


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            "\n".join(["n01", "n02", "n01", "n03"]),
            r"labels.txt lists 'n01' on 2 of 4 lines.*move the file away",
            id="labels of the validation images",
        ),
        pytest.param(
            "0:background\n1:n01\n2:n02",
            r"labels.txt has lines such as '0:background'.*without a class for the background",
            id="the format of TF-slim",
        ),
        pytest.param("\n ", r"labels.txt is empty\. Write one class name on each line", id="empty"),
    ],
)
def test_class_list_of_shards_in_another_form_raises(content, message, tmp_path):
    directory = write_numbered_classes("tfrecord", tmp_path)
    (directory / "labels.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        datasets.open_source("tfrecord", str(directory))


def test_class_list_of_shards_that_is_too_short_makes_bad_records(tmp_path):
    directory = write_numbered_classes("tfrecord", tmp_path)
    (directory / "labels.txt").write_text("n01\nn02")
    with pytest.raises(
        BadRecord, match=r"train-00000-of-00002, offset .*: label 2 is not one of 2 classes"
    ):
        datasets.open_source("tfrecord", str(directory)).read(range(14))


def test_class_list_of_shards_may_begin_with_a_byte_order_mark(tmp_path):
    # Editors on Windows write one.
    directory = write_numbered_classes("tfrecord", tmp_path)
    (directory / "labels.txt").write_text("\ufeff" + "\n".join(support.CLASSES))
    (directory / "validation_synset_labels.txt").write_text("not read")
    assert datasets.open_source("tfrecord", str(directory)).class_names == support.CLASSES


def write_class_names(directory, split, names, shard=0):
    """Writes the names of classes into the metadata of a Parquet file."""
    from pyarrow import parquet

    path = directory / "data" / f"{split}-{shard:05d}-of-00002.parquet"
    table = parquet.read_table(path)
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    meta = {"huggingface": json.dumps({"info": {"features": features}})} if names else {}
    parquet.write_table(table.replace_schema_metadata(meta), path)


def test_parquet_files_that_name_different_classes_raise(tmp_path):
    make("parquet", tmp_path)
    write_class_names(tmp_path, "train", list(reversed(support.CLASSES)), shard=1)
    with pytest.raises(
        UserError,
        match=r"train-00000-of-00002.parquet and .*train-00001.* name different .*class 0 is",
    ):
        datasets.open_source("parquet", str(tmp_path))


def test_parquet_file_without_class_names_takes_those_of_another(tmp_path):
    make("parquet", tmp_path)
    write_class_names(tmp_path, "train", None, shard=1)
    source = datasets.open_source("parquet", str(tmp_path))
    assert source.class_names == support.CLASSES
    assert (
        "1 files do not name the classes, the first is data/train-00001-of-00002.parquet"
        in source.notes[0].text
    )


def test_parquet_files_without_class_names_need_the_number_of_classes(tmp_path):
    make("parquet", tmp_path)
    for shard in range(2):
        write_class_names(tmp_path, "validation", None, shard)
    with pytest.raises(UserError, match=r"do not name the classes\. Set --num_classes"):
        datasets.open_source("parquet", str(tmp_path), "validation")
    source = datasets.open_source("parquet", str(tmp_path), "validation", num_classes=3)
    assert source.class_names == ("0", "1", "2")


def test_parquet_files_with_text_labels_or_different_columns_raise_one_line(tmp_path):
    import pyarrow
    from pyarrow import parquet

    def write(number, **columns):
        parquet.write_table(
            pyarrow.table(columns), tmp_path / f"train-0000{number}-of-00002.parquet"
        )

    write(0, image=[b"x"], label=[1])
    write(1, image=[b"x"], label=["cat"])
    with pytest.raises(
        UserError, match=r"Column label of .*00001-of-00002.parquet holds string, not class numbers"
    ):
        datasets.open_source("parquet", str(tmp_path))
    write(1, img=[b"x"], label=[1])
    with pytest.raises(
        UserError,
        match=r"columns of .*00001.* are img and label, but those of train-0000.* image and label",
    ):
        datasets.open_source("parquet", str(tmp_path))


def test_check_splits_accepts_numbers_instead_of_names():
    listing.check_splits("folder", ("cat", "dog"), ("0", "1"))


@pytest.mark.parametrize("form", ["tfrecord", "webdataset", "idx"])
def test_class_list_in_utf16_names_the_classes_and_in_latin1_raises(form, tmp_path):
    if form == "tfrecord":
        support.write_shards(tmp_path, "train", support.tiny("train"))
    elif form == "webdataset":
        support.write_tars(tmp_path, "train", support.tiny("train"), 20)
    else:
        for name, array in (
            ("images-idx3", np.zeros((3, 8, 8), np.uint8)),
            ("labels-idx1", np.arange(3, dtype=np.uint8)),
        ):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (tmp_path / f"train-{name}-ubyte").write_bytes(header + array.tobytes())
    labels = tmp_path / "labels.txt"
    labels.write_bytes("cat\r\nM\u00f6we\r\nowl\r\n".encode("utf-16"))
    assert datasets.open_source(form, str(tmp_path)).class_names == ("cat", "M\u00f6we", "owl")
    labels.write_bytes("cat\nM\u00f6we\nowl\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"labels.txt: is not text in UTF-8"):
        datasets.open_source(form, str(tmp_path))
