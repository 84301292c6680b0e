"""Tests all forms of local datasets: their contents, damage, and wrong directories."""

import concurrent.futures
import dataclasses
import errno
import io
import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hybrid_imagenet import data
from hybrid_imagenet.commands.data import prepare
from hybrid_imagenet.data import datasets, pipeline
from hybrid_imagenet.data.bad_records import BadRecords, ExampleReader
from hybrid_imagenet.data.sources import digits, tfrecord
from hybrid_imagenet.data.sources.source import BadRecord, load_index, load_or_build_index
from hybrid_imagenet.errors import StorageError, UserError
from tests.data import support
from tests.support.processes import python


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_tfds(directory):
    """Writes the tiny dataset as TFDS stores imagenet2012, with the writer of TFDS."""
    tfds = pytest.importorskip("tensorflow_datasets")
    builder = tfds.builder("imagenet2012", data_dir=directory, file_format="tfrecord")
    Path(builder.data_dir).mkdir(parents=True)
    writer = tfds.core.SequentialWriter(
        builder.info, max_examples_per_shard=7, file_format="tfrecord"
    )
    splits = ("train", "validation")
    writer.initialize_splits(splits)
    for split in splits:
        examples = [
            {"image": io.BytesIO(image), "label": label, "file_name": f"{number}.JPEG"}
            for number, (image, label) in enumerate(support.tiny(split))
        ]
        writer.add_examples({split: examples})
    writer.close_all()


def make(form, directory):
    """Writes the tiny dataset in a form; returns the name with which it is opened."""
    if form == "tfds":
        write_tfds(directory)
        return "imagenet2012"
    for split in datasets.SPLITS:
        pairs = support.tiny(split)
        if form == "imagenet":
            support.write_shards(directory, split, pairs)
        elif form == "plain":
            support.write_shards(directory / split, split, pairs, plain=True)
        elif form == "folder":
            support.write_folder(directory, split, pairs)
        else:
            support.write_parquet(directory / "data", split, pairs)
    if form in ("imagenet", "plain"):
        (directory / "labels.txt").write_text("\n".join(support.CLASSES) + "\n")
        return "tfrecord"
    return form


@pytest.mark.parametrize("form", ["imagenet", "plain", "folder", "parquet", "tfds"])
def test_open_source_returns_the_same_images_and_labels_for_all_forms(form, tmp_path):
    directory = tmp_path / "set"
    directory.mkdir()
    name = make(form, directory)
    for split in datasets.SPLITS:
        source = datasets.open_source(name, str(directory), split)
        images, labels = source.read(np.arange(source.num_examples))
        expected = sorted((label, image) for image, label in support.tiny(split))
        assert sorted(zip(labels.tolist(), images, strict=True)) == expected
        assert labels.dtype == np.int32
        if form == "tfds":
            assert source.num_classes == 1000
            assert source.class_names[0] == "n01440764"
        else:
            assert source.class_names == support.CLASSES
        assert source.reads.operations >= 1
        assert source.reads.bytes_read >= sum(map(len, images)) * (form != "parquet")


def test_tfrecord_without_class_names_needs_the_number_of_classes(tmp_path):
    support.write_shards(tmp_path, "train", support.tiny("train"))
    with pytest.raises(UserError, match=r"do not name the classes\. Set --num_classes"):
        datasets.open_source("tfrecord", str(tmp_path))
    assert datasets.open_source("tfrecord", str(tmp_path), num_classes=7).num_classes == 7
    few = datasets.open_source("tfrecord", str(tmp_path), num_classes=2)
    with pytest.raises(BadRecord, match="label 2 is not one of 2 classes"):
        few.read(range(14))
    support.write_shards(
        tmp_path, "train", [(image, label - 1) for image, label in support.tiny("train")]
    )
    with pytest.raises(
        UserError,
        match="image/class/label is 0, but counts from 1: store labels that count from 0 in label",
    ):
        datasets.open_source("tfrecord", str(tmp_path), num_classes=3)


def test_digits_are_distinct_and_divided_by_class(tmp_path):
    train = datasets.open_source("digits", str(tmp_path))
    held_out = datasets.open_source("digits", str(tmp_path), "validation")
    assert (train.num_examples, held_out.num_examples, train.num_classes) == (1500, 297, 10)
    images, labels = train.read(range(1500))
    assert np.bincount(labels).min() > 140
    more, held_labels = held_out.read(range(297))
    assert set(np.bincount(held_labels)) == {29, 30}
    assert len({*images, *more}) == 1797


def test_digits_equal_those_of_scikit_learn():
    originals = pytest.importorskip("sklearn.datasets").load_digits()
    images, labels = digits._load_digits()
    np.testing.assert_array_equal(images, originals.images)
    np.testing.assert_array_equal(labels, originals.target)


def test_digits_arrays_equal_the_source_of_the_program(tmp_path):
    (x_train, y_train), (x_test, y_test) = data.digits()
    assert (x_train.shape, x_train.dtype, y_train.shape) == ((1500, 8, 8), np.uint8, (1500,))
    assert (x_test.shape, x_test.dtype, y_test.shape) == ((297, 8, 8), np.uint8, (297,))
    assert (x_train.min(), x_train.max()) == (0, 16)
    held_out = datasets.open_source("digits", str(tmp_path), "validation")
    encoded, labels = held_out.read(range(297))
    np.testing.assert_array_equal(y_test, labels)
    shrunk = Image.open(io.BytesIO(encoded[0])).convert("L").resize((8, 8), Image.Resampling.BOX)
    assert np.corrcoef(np.asarray(shrunk).ravel(), x_test[0].ravel())[0, 1] > 0.95


def test_digits_are_written_once_by_several_processes_at_the_same_time(tmp_path):
    code = (
        "import sys; from hybrid_imagenet.data import datasets;"
        " print(datasets.open_source('digits', sys.argv[1]).num_examples)"
    )
    started = [python("-c", code, tmp_path) for _ in range(2)]
    assert [process.communicate(timeout=60)[0].strip() for process in started] == ["1500"] * 2
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["digits-1"]


def test_synthetic_source_has_distinct_images_as_large_as_photographs():
    source = datasets.open_source("synthetic", num_examples=50, num_classes=4)
    images, labels = source.read(range(50))
    assert labels.tolist() == [number % 4 for number in range(50)]
    assert len(set(images)) == 50
    assert 90_000 < np.mean([len(image) for image in images]) < 130_000
    assert datasets.open_source("synthetic_tensors", split="validation").num_examples == 50_000


def test_synthetic_tensors_repeat_pixels_but_count_labels_and_weights():
    source = datasets.open_source("synthetic_tensors", split="validation", num_examples=200)
    elements = list(pipeline.evaluation_batches(source, 3, 0, 1, image_size=16))
    assert (
        sum(float(element["weight"].numpy().sum()) for element in elements)
        == source.num_examples
        == 7
    )
    assert [int(label) for element in elements for label in element["label"]][:7] == list(range(7))
    assert all(element["image"] is elements[0]["image"] for element in elements)


def test_frame_and_scan_shard_agree_with_tensorflow(tmp_path):
    payloads = [bytes([number]) * (number * 7) for number in range(5)]
    path = tmp_path / "by_tensorflow"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for payload in payloads:
            writer.write(payload)
    content = path.read_bytes()
    assert content == b"".join(map(tfrecord.frame, payloads))
    offsets, lengths, damage = tfrecord.scan_shard(path)
    assert damage == ""
    result = [tfrecord.unframe(content[o : o + n]) for o, n in zip(offsets, lengths, strict=True)]
    assert result == payloads


def flip_bit(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_tfrecord_with_a_flipped_bit_is_a_bad_record_with_file_and_offset(tmp_path):
    support.write_shards(tmp_path, "train", support.tiny("train"))
    path = tmp_path / "train-00001-of-00002"
    offsets, lengths, _ = tfrecord.scan_shard(path)
    flip_bit(path, int(offsets[3] + lengths[3] // 2))
    source = datasets.open_source("tfrecord", str(tmp_path), num_classes=3)
    with pytest.raises(BadRecord, match="checksum of the data") as error:
        source.read(range(14))
    assert (error.value.file, error.value.offset) == (str(path), offsets[3])


def joined(content, offsets, lengths):
    return content[: int(offsets[2] + 40)] + content[int(offsets[4] + 40) :]


def zeroed(content, offsets, lengths):
    return content[: offsets[2]] + bytes(int(lengths[2])) + content[offsets[3] :]


def cut(content, offsets, lengths):
    return content[: offsets[2] + 50]


@pytest.mark.parametrize(
    ("damage", "record", "reason"),
    [
        (zeroed, 2, "the checksum of the record's length does not match"),
        (joined, 3, "the checksum of the record's length does not match"),
        (cut, 2, "the record is truncated: 50 of"),
    ],
)
def test_tfrecord_shard_that_is_damaged_raises_file_and_offset(damage, record, reason, tmp_path):
    support.write_shards(tmp_path, "train", support.tiny("train"), shards=2)
    path = tmp_path / "train-00000-of-00002"
    offsets, lengths, _ = tfrecord.scan_shard(path)
    path.write_bytes(damage(path.read_bytes(), offsets, lengths))
    line = (
        rf"train-00000-of-00002, offset {offsets[record]}: {reason}.*"
        r"\(1 of 2 shards are damaged\)\. Restore the file"
    )
    with pytest.raises(UserError, match=line):
        datasets.open_source("tfrecord", str(tmp_path), num_classes=3)


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_tfrecords_that_are_compressed_raise_a_command_that_decompresses_them(
    kind, suffix, tmp_path
):
    support.write_shards(tmp_path, "train", support.tiny("train"), shards=1)
    path = tmp_path / "train-00000-of-00001"
    whole = path.read_bytes()
    with tf.io.TFRecordWriter(str(tmp_path / "packed"), kind) as writer:
        for payload in tf.data.TFRecordDataset(str(path)):
            writer.write(payload.numpy())
    path.unlink()
    (tmp_path / "packed").rename(f"{path}{suffix}")
    with pytest.raises(
        UserError, match=rf"is compressed \({kind}\), .* Decompress each shard"
    ) as error:
        datasets.open_source("tfrecord", str(tmp_path), num_classes=3)
    command = str(error.value).partition("as in: ")[2]
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    assert (tmp_path / "plain" / path.name).read_bytes() == whole


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("form", ["imagenet", "folder", "parquet", "webdataset"])
def test_example_reader_whose_directory_disappears_raises_its_name_and_skips_nothing(
    form, policy, tmp_path
):
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    if form == "webdataset":
        support.write_tars(mounted, "train", support.tiny("train"), 20)
        source = datasets.open_source(form, str(mounted))
    else:
        source = datasets.open_source(make(form, mounted), str(mounted))
    mounted.rename(tmp_path / "elsewhere")
    examples = ExampleReader(source, BadRecords(source, policy, 100))
    reason = (
        rf"^{mounted}: the directory of the images can no longer be read \(No such file or"
        r" directory\)\. Mount or"
    )
    with pytest.raises(StorageError, match=reason):
        examples.read(np.arange(3))
    # An unmounted directory of shards is still there, but empty.
    if form == "imagenet":
        mounted.mkdir()
        with pytest.raises(StorageError, match=rf"^{mounted}: .*it is empty"):
            examples.read(np.arange(3))


@pytest.mark.parametrize("error_number", [errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize("form", ["imagenet", "folder", "parquet", "webdataset"])
def test_example_reader_on_a_machine_at_its_limits_skips_nothing(
    form, error_number, tmp_path, monkeypatch
):
    if form == "webdataset":
        support.write_tars(tmp_path, "train", support.tiny("train"), 20)
        source = datasets.open_source(form, str(tmp_path))
    else:
        source = datasets.open_source(make(form, tmp_path), str(tmp_path))

    def fail(*arguments, **options):
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(pytest.importorskip("pyarrow.parquet"), "ParquetFile", fail)
    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(os, "pread", fail)
    bad_records = BadRecords(source, "skip", 100)
    with pytest.raises(UserError, match=r"may be intact\. Free memory, or raise the limit"):
        ExampleReader(source, bad_records).read(np.arange(3))
    assert not bad_records.reasons


def test_image_that_disappears_from_its_directory_is_a_bad_record(tmp_path):
    source = datasets.open_source(make("folder", tmp_path), str(tmp_path))
    Path(source.locate(0)[0]).unlink()
    with pytest.raises(BadRecord, match="No such file or directory"):
        source.read_one(0)


@pytest.mark.parametrize(
    "name", ["train-00000-of-00001", "train-0.tar", "train.parquet", "manifest.json"]
)
def test_open_source_with_a_pipe_instead_of_a_file_raises(name, tmp_path):
    os.mkfifo(tmp_path / name)
    form = {".tar": "webdataset", ".parquet": "parquet"}.get(Path(name).suffix, "tfrecord")
    with pytest.raises(UserError, match=rf"{name} .*is not a regular file"):
        datasets.open_source(form, str(tmp_path), num_classes=3)


def test_folder_with_a_link_to_a_pipe_or_a_device_has_a_bad_record(tmp_path):
    source = datasets.open_source(make("folder", tmp_path), str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    for number, target in enumerate((tmp_path / "pipe", "/dev/zero")):
        path = Path(source.locate(number)[0])
        path.unlink()
        path.symlink_to(target)
        with pytest.raises(BadRecord, match="is not a regular file"):
            source.read_one(number)


def list_entry(*lengths):
    return {"filenames": ["a.tar"], "shard_lengths": lengths}


def write_list(directory, splits):
    (directory / "_info.json").write_text(json.dumps({"splits": splits}))


@pytest.mark.parametrize(
    ("name", "prepare", "message"),
    [
        ("folder", lambda d: (d / "train").mkdir(), "has no class directories"),
        ("folder", lambda d: (d / "train" / "n01").mkdir(parents=True), "contain no images"),
        ("tfrecord", lambda d: (d / "train-00000-of-00001").touch(), "hold no records"),
        (
            "tfrecord",
            lambda d: (d / "train-00000-of-00001").mkdir(),
            "train-00000-of-00001 cannot be read",
        ),
        ("tfrecord", lambda d: (d / "manifest.json").write_text("{}"), "not a readable manifest"),
        (
            "parquet",
            lambda d: (d / "train.parquet").write_text("no"),
            "not a readable Parquet file",
        ),
        ("no_such_set", lambda d: None, "--dataset=no_such_set is unknown"),
        ("imagenet2012", lambda d: None, "--dataset=imagenet2012 was not found in"),
        ("imagenet2012", lambda d: (d / "train").mkdir(), "It looks like --dataset=folder"),
        (
            "imagenet2012",
            lambda d: support.write_shards(d / "train", "train", support.tiny("train")),
            "It looks like --dataset=tfrecord",
        ),
        ("webdataset", lambda d: (d / "train-0.tar").touch(), "offset 0: .*empty file"),
        ("webdataset", lambda d: (d / "train-0.tar").write_bytes(bytes(10240)), "hold no samples"),
        ("webdataset", lambda d: write_list(d, {}), "does not list the files of train"),
        (
            "webdataset",
            lambda d: write_list(d, {"train": list_entry(math.inf)}),
            "does not list the files of train",
        ),
        ("webdataset", lambda d: write_list(d, {"train": list_entry()}), "1 files but 0 lengths"),
        (
            "webdataset",
            lambda d: write_list(d, {"train": list_entry(3)}),
            "a.tar cannot be read .No such file",
        ),
    ],
)
def test_open_source_of_unusable_data_raises_one_line(name, prepare, message, tmp_path):
    directory = tmp_path / "set"
    directory.mkdir()
    prepare(directory)
    with pytest.raises(UserError, match=message) as error:
        datasets.open_source(name, str(directory), num_classes=3)
    assert "\n" not in str(error.value)


def test_parquet_row_groups_in_memory_are_bounded(tmp_path):
    make("parquet", tmp_path)
    small = datasets.open_source("parquet", str(tmp_path), memory_bytes=1)
    large = datasets.open_source("parquet", str(tmp_path))
    for source in (small, large):
        for _ in range(2):
            source.read(range(source.num_examples))
    # There are 14 rows in two files, in groups of 3.
    assert large.reads.operations == 6
    assert small.reads.operations == 12
    shared = datasets.open_source("parquet", str(tmp_path))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(shared.read_one, [0] * 8))
    # One of the eight threads reads, and the others wait for it.
    assert shared.reads.operations == 1


def test_empty_shard_next_to_another_is_noted_as_a_fault(tmp_path):
    make("imagenet", tmp_path)
    (tmp_path / "train-00001-of-00002").write_bytes(b"")
    (note,) = datasets.open_source("tfrecord", str(tmp_path), num_classes=3).notes
    assert "1 of 2 shards are empty: " in note.text
    assert note.fault


def test_directory_without_permission_raises_one_line(tmp_path, monkeypatch):
    make("imagenet", tmp_path)

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be read \\(Permission denied\\)"):
        datasets.open_source("tfrecord", str(tmp_path), num_classes=3)


def test_parquet_page_with_a_wrong_checksum_is_a_bad_record(tmp_path):
    make("parquet", tmp_path)
    parquet = pytest.importorskip("pyarrow.parquet")
    path = sorted(tmp_path.rglob("train*.parquet"))[0]
    parquet.write_table(
        parquet.read_table(path), path, write_page_checksum=True, compression="none"
    )
    content = path.read_bytes()
    first = datasets.open_source("parquet", str(tmp_path)).read_one(0)[0]
    at = content.index(first) + len(first) // 2
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(BadRecord, match=f"{path}.*(checksum|CRC)"):
        datasets.open_source("parquet", str(tmp_path)).read_one(0)


def test_parquet_row_group_that_is_damaged_makes_only_its_rows_bad(tmp_path):
    make("parquet", tmp_path)
    parquet = pytest.importorskip("pyarrow.parquet")
    path = sorted(tmp_path.rglob("train*.parquet"))[0]
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + 8] = b"\xff" * 8
    path.write_bytes(content)
    source = datasets.open_source("parquet", str(tmp_path))
    source.read_one(0)
    with pytest.raises(BadRecord) as error:
        source.read_one(3)
    assert (error.value.file, error.value.offset) == (str(path), 3)


def write_folder_without_splits(directory):
    """Writes class directories: ten images of class a and three of class b, all different."""
    for name, count in (("a", 10), ("b", 3)):
        (directory / name).mkdir(parents=True)
        for number in range(count):
            (directory / name / f"{number}.jpg").write_bytes(
                support.jpeg(number + 100 * (name == "b"), 8, 8)
            )
    return directory


@pytest.mark.parametrize("inner", ["", "train"])
def test_val_fraction_of_a_folder_splits_each_class(tmp_path, inner):
    directory = write_folder_without_splits(tmp_path / inner)
    train, validation = (
        datasets.open_source("folder", str(tmp_path), split, val_fraction=0.2)
        for split in ("train", "validation")
    )
    assert train.class_names == validation.class_names == ("a", "b")
    paths = [
        [source.locate(i)[0] for i in range(source.num_examples)] for source in (train, validation)
    ]
    assert (len(paths[0]), len(paths[1])) == (10, 3)
    assert sorted(paths[0] + paths[1]) == sorted(str(path) for path in directory.rglob("*.jpg"))
    assert validation.read(np.arange(3))[1].tolist() == [0, 0, 1]


def test_class_folders_without_splits_raise_an_error_that_names_val_fraction(tmp_path):
    write_folder_without_splits(tmp_path)
    with pytest.raises(UserError, match=r"no directory train\. Add --val_fraction=0\.2"):
        datasets.open_source("folder", str(tmp_path))


def test_train_directory_without_validation_raises_an_error_that_names_val_fraction(tmp_path):
    write_folder_without_splits(tmp_path / "train")
    with pytest.raises(
        UserError, match=r"no directory validation or val or valid or test\. Add --val_fraction"
    ):
        datasets.open_source("folder", str(tmp_path), "validation")


def test_val_fraction_of_classes_with_one_image_each_raises(tmp_path):
    write_folder_without_splits(tmp_path / "train")
    for path in tmp_path.rglob("*[1-9].jpg"):
        path.unlink()
    with pytest.raises(
        UserError, match=r"--val_fraction=0\.2 leaves no image for the validation split"
    ):
        datasets.open_source("folder", str(tmp_path), "validation", val_fraction=0.2)


def test_val_fraction_with_a_directory_of_validation_images_raises(tmp_path):
    make("folder", tmp_path)
    with pytest.raises(UserError, match="has validation images already"):
        datasets.open_source("folder", str(tmp_path), val_fraction=0.2)


def test_val_fraction_with_another_dataset_than_folder_raises():
    with pytest.raises(UserError, match=r"--val_fraction=0\.2 needs --dataset=folder, not digits"):
        datasets.open_source("digits", val_fraction=0.2)


@dataclasses.dataclass
class Numbers:
    values: np.ndarray


def test_load_or_build_index_with_a_damaged_file_builds_again(tmp_path):
    path = tmp_path / "deep" / "index.npz"
    builds = []

    def call():
        return load_or_build_index(
            path, Numbers, lambda: builds.append(1) or Numbers(np.array([1, 2]))
        ).values.tolist()

    assert [call(), call()] == [[1, 2], [1, 2]]
    assert len(builds) == 1
    whole = path.read_bytes()
    damaged = [b"", b"PK\x03\x04", b"{", *(whole[:size] for size in range(0, len(whole), 7))]
    for position in range(len(whole)):
        flipped_byte = bytes([whole[position] ^ 0x21])
        damaged.append(whole[:position] + flipped_byte + whole[position + 1 :])
    for content in damaged:
        path.write_bytes(content)
        assert call() == [1, 2]
        assert load_index(path, Numbers).values.tolist() == [1, 2]
    # If the cache cannot be written, only the time to build the index is lost.
    (tmp_path / "file").touch()
    assert load_or_build_index(tmp_path / "file" / "index", Numbers, lambda: 5) == 5


def test_load_or_build_index_in_two_processes_builds_once(tmp_path):
    # Otherwise two ranks of a host would both scan all shards.
    program = f"""
import dataclasses, pathlib, time
import numpy as np
from hybrid_imagenet.data.sources.source import load_or_build_index
Numbers = dataclasses.make_dataclass("Numbers", ["values"])
def make():
    with open({str(tmp_path / "made")!r}, "a") as made:
        made.write("x")
    time.sleep(1)
    return Numbers(np.array([1, 2]))
path = pathlib.Path({str(tmp_path / "index.npz")!r})
print(load_or_build_index(path, Numbers, make).values.tolist())
"""
    builders = [python("-c", program) for _ in range(2)]
    assert [process.communicate()[0] for process in builders] == ["[1, 2]\n"] * 2
    assert (tmp_path / "made").read_text() == "x"


def test_index_of_shards_is_cached_until_a_file_changes(tmp_path, monkeypatch):
    support.write_shards(tmp_path, "train", support.tiny("train"))
    files = tfrecord.find_shards(tmp_path, "train")
    first = tfrecord.load_or_scan_index(files)
    with monkeypatch.context() as patch:
        patch.setattr(tfrecord, "scan_shard", None)
        again = tfrecord.load_or_scan_index(files)
    np.testing.assert_array_equal(first.offset, again.offset)
    files[0].write_bytes(b"")
    assert len(tfrecord.load_or_scan_index(files).offset) == 7


def test_damaged_index_of_prepared_shards_is_built_again(tmp_path):
    target = tmp_path / "shards"
    prepare.prepare_dataset(
        datasets.DatasetRequest("digits", str(tmp_path / "digits")),
        target,
        prepare.PrepareSettings(per_shard=500),
    )
    index = target / "validation.index.npz"
    for content in (b"", index.read_bytes()[:-1]):
        index.write_bytes(content)
        assert datasets.open_source("tfrecord", str(target), "validation").read_one(296)[
            1
        ] in range(10)


def test_encode_example_agrees_with_tensorflow():
    content = tfrecord.encode_example({"image": b"abc", "label": -5, "text": b""})
    feature = tf.train.Example.FromString(content).features.feature
    assert feature["image"].bytes_list.value[0] == b"abc"
    assert feature["label"].int64_list.value[0] == -5
    assert tfrecord.decode_example(content, ["image", "label", "none"]) == {
        "image": [b"abc"],
        "label": [-5],
    }


def write_examples(path, examples):
    """Writes a shard with TensorFlow; each example maps a feature to its list of values."""
    lists = {bytes: ("bytes_list", tf.train.BytesList), int: ("int64_list", tf.train.Int64List)}
    lists[float] = ("float_list", tf.train.FloatList)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for example in examples:
            feature = {}
            for key, values in example.items():
                name, kind = lists[type(values[0])]
                feature[key] = tf.train.Feature(**{name: kind(value=values)})
            writer.write(
                tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
            )


IMAGE = support.jpeg(0)


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        (
            {"image": [IMAGE], "label": [0, 0, 1]},
            "label holds 3 values, as one-hot or multiple labels do",
        ),
        (
            {"image/encoded": [IMAGE], "image/class/label": [3, 1]},
            "image/class/label holds 2 values",
        ),
        ({"image": [IMAGE], "label": [0.0, 1.0]}, "label holds 2 values"),
        (
            {"image": [IMAGE], "label": [1.0]},
            "label holds a floating-point number instead of a class number",
        ),
        ({"image": [IMAGE], "label": [b"cat"]}, "label holds bytes instead of a class number"),
        (
            {"image": [IMAGE, IMAGE], "label": [1]},
            "image holds 2 values: write one image per record",
        ),
        (
            {"image": [7], "label": [1]},
            "image holds an integer instead of the bytes of an encoded image",
        ),
    ],
)
def test_tfrecord_with_other_than_one_image_and_one_class_number_is_a_bad_record(
    example, reason, tmp_path
):
    write_examples(tmp_path / "train-00000-of-00001", [{"image": [IMAGE], "label": [2]}, example])
    source = datasets.open_source("tfrecord", str(tmp_path), num_classes=3)
    assert source.read_one(0) == (IMAGE, 2)
    with pytest.raises(BadRecord, match=reason) as error:
        source.read_one(1)
    assert error.value.offset == source.locate(1)[1]


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        (
            {"image": [IMAGE], "class": [1], "id": [b"abc"]},
            r"the Example has no image/encoded with image/class/label or image with label\. It has"
            r" class, id, image\. The other records .* Write them again, .* in image and",
        ),
        (
            {"empty": [0], **{f"feature {number:02d}": [number] for number in range(14)}},
            r"It has empty, feature 00, .*, feature 08 and 5 more\.",
        ),
        ({}, "It has no features"),
        ({"image": [IMAGE], "label": [b"rose"]}, "label holds bytes instead of a class number"),
    ],
)
def test_tfrecord_of_another_program_raises_an_error_that_names_its_features(
    example, reason, tmp_path
):
    write_examples(tmp_path / "train-00000-of-00001", [example, example])
    with pytest.raises(UserError, match=reason) as error:
        datasets.open_source("tfrecord", str(tmp_path), num_classes=3)
    assert "skip" not in str(error.value)


def test_tfrecord_with_a_damaged_first_record_has_a_bad_record(tmp_path):
    path = tmp_path / "train-00000-of-00001"
    write_examples(path, [{"image": [IMAGE], "label": [1]}, {"image": [IMAGE], "label": [2]}])
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    source = datasets.open_source("tfrecord", str(tmp_path), num_classes=3)
    assert source.read_one(1) == (IMAGE, 2)
    with pytest.raises(BadRecord, match="the checksum of the data does not match"):
        source.read_one(0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"image": [IMAGE], "label": [[0, 1]]},
            r"Column label of .* holds list<.*>, not class numbers",
        ),
        (
            {"image": [[IMAGE, IMAGE]], "label": [1]},
            r"Column image of .* holds list<.*> instead of the bytes of one encoded",
        ),
        (
            {"image": [{"path": "a.jpg"}], "label": [1]},
            r"Column image of .* holds struct<path: string> instead of the bytes",
        ),
    ],
)
def test_parquet_with_lists_of_images_or_labels_raises(columns, message, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=message):
        datasets.open_source("parquet", str(tmp_path), num_classes=2)


@pytest.mark.parametrize("form", ["binary", "large_binary", "dictionary", "struct"])
def test_parquet_with_any_form_of_bytes_returns_the_image(form, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    if form == "struct":
        image = pyarrow.array(
            [{"bytes": IMAGE}], pyarrow.struct([("bytes", pyarrow.large_binary())])
        )
    elif form == "dictionary":
        image = pyarrow.array([IMAGE]).dictionary_encode()
    else:
        image = pyarrow.array([IMAGE], form)
    parquet.write_table(pyarrow.table({"image": image, "label": [1]}), tmp_path / "train.parquet")
    source = datasets.open_source("parquet", str(tmp_path), num_classes=2)
    assert source.read_one(0) == (IMAGE, 1)
