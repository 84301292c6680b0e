import concurrent.futures
import socket
import sys
import threading

import datasets
import numpy as np
import pytest

from hybrid_imagenet import data
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.pipeline import HostOptions
from hybrid_imagenet.data.sources.base import BadRecord
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.sampling import Cursor, SampleOrder
from hybrid_imagenet.tools.data import command as program
from tests.data import support
from tests.data.test_sources import cache  # noqa: F401

N = 41
LABELS = datasets.ClassLabel(names=list(support.CLASSES))
INTEGER = datasets.Value("int64")


def table(images, labels, image=None, label=LABELS, names=("image", "label")):
    """Rows of which the images are undecoded; `image` and `label` are the features of their columns."""
    features = dict(zip(names, (image or datasets.Image(decode=False), label), strict=True))
    columns = dict(zip(names, (images, labels), strict=True))
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def kept(*contents):
    return [{"bytes": content, "path": None} for content in contents]


def small(labels=(0, 1, 2), **features):
    return table(kept(b"zero", b"one", b"two"), list(labels), **features)


def save(directory, train, validation=None, **options):
    saved = datasets.DatasetDict({"train": train, "validation": validation or train})
    saved.save_to_disk(directory, **options)
    return str(directory)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """41 images with labels of their own, saved in shuffled order in files of 14, 14 and 13 rows."""
    directory = tmp_path_factory.mktemp("whole")
    images = [support.jpeg(number, 12, 16) for number in range(N)]
    rows = table(kept(*images), list(range(N)), label=datasets.ClassLabel(num_classes=N))
    save(directory, rows.shuffle(seed=1), num_shards={"train": 3, "validation": 1})
    return directory, images


def everything(source):
    return [source.read_one(index) for index in range(source.num_examples)]


def test_every_image_and_label_is_as_it_was_saved_and_has_a_file_and_a_row(whole):
    directory, images = whole
    source = data.open_source("huggingface", str(directory))
    rows = everything(source)
    assert sorted(rows, key=lambda row: row[1]) == list(zip(images, range(N), strict=True))
    assert [label for _, label in rows] != list(range(N))  # the order of the shuffled set
    assert (source.num_examples, source.num_classes) == (N, N)
    assert source.class_names == tuple(map(str, range(N)))
    saved = datasets.load_from_disk(directory / "train").cast_column("image", datasets.Image(decode=False))
    for index, (image, _) in enumerate(rows):
        place, row = source.locate(index)
        assert place == str(directory / "train")
        assert saved[row]["image"]["bytes"] == image
    assert source.io_statistics().bytes_read == sum(map(len, images))
    assert source.io_statistics().operations == N


def test_many_threads_read_the_same_rows(whole):
    source = data.open_source("huggingface", str(whole[0]))
    expected = everything(source)
    together = threading.Barrier(32)

    def read(seed):
        order = np.random.default_rng(seed).permutation(N)
        together.wait(60)
        return all(source.read_one(int(index)) == expected[index] for _ in range(5) for index in order)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert all(pool.map(read, range(32)))
    assert source.io_statistics().operations == N + 32 * 5 * N


def test_batches_are_those_of_shards_with_the_same_images_and_a_stopped_epoch_goes_on_with_the_rest(whole, tmp_path):
    saved = data.open_source("huggingface", str(whole[0]))
    support.write_shards(tmp_path, "train", everything(saved), plain=True)
    shards = data.open_source("tfrecord", str(tmp_path), num_classes=N)
    order = SampleOrder(N, seed=3)

    def train(source, start=Cursor()):  # noqa: B008
        batches = pipeline.training(
            source, order, start, (4, 1), 0, 1,
            epochs=1, image_size=8, augmentation="inception", options=HostOptions(readers=8),
        )  # fmt: skip
        return [{key: value.numpy() for key, value in batch.items()} for batch in batches]

    batches, reference = train(saved), train(shards)
    assert len(batches) == len(reference) == 11
    for batch, other in zip(batches, reference, strict=True):
        for key, value in other.items():
            np.testing.assert_array_equal(batch[key], value)
    before = batches[:3]
    after = train(data.open_source("huggingface", str(whole[0])), order.advance(Cursor(), 4, 3))
    seen = [int(label) for batch in (*before, *after) for label in batch["label"]]
    assert sorted(seen[:N]) == list(range(N))


@pytest.mark.parametrize("names", [("image", "label"), ("img", "fine_label"), ("jpg", "cls")])
@pytest.mark.parametrize("image", ["binary", "large_binary"])
def test_bytes_without_the_type_of_images_are_images_by_their_column(image, names, tmp_path):
    rows = table([b"zero", b"one"], [0, 1], datasets.Value(image), names=names)
    assert everything(data.open_source("huggingface", save(tmp_path, rows))) == [(b"zero", 0), (b"one", 1)]


def test_images_may_lie_in_files_of_their_own(tmp_path):
    for name in ("zero", "one"):
        (tmp_path / name).write_text(f"image {name}")
    paths = [str(tmp_path / "zero"), str(tmp_path / "one"), str(tmp_path / "two")]
    rows = table(paths, [0, 1, 2], datasets.Value("string"))
    source = data.open_source("huggingface", save(tmp_path / "set", rows))
    assert source.read([0, 1])[0] == [b"image zero", b"image one"]
    with pytest.raises(BadRecord, match=r"train, offset 2: .*No such file.*two"):
        source.read([2])


def test_splits_saved_one_by_one_and_classes_without_names(tmp_path):
    small((0, 4, 2), label=INTEGER).save_to_disk(tmp_path / "train")
    small((0, 1, 7), label=datasets.Value("uint8")).save_to_disk(tmp_path / "test")
    with pytest.raises(UserError, match="do not name the classes: give --num_classes"):
        data.open_source("huggingface", str(tmp_path))
    held_out = data.open_source("huggingface", str(tmp_path), "validation", num_classes=5)
    assert held_out.class_names == ("0", "1", "2", "3", "4")
    with pytest.raises(BadRecord, match="offset 2: label 7 is not one of 5 classes"):
        held_out.read([2])
    assert data.open_source("huggingface", str(tmp_path), "validation", num_classes=8).read([2])[1].tolist() == [7]


def test_rows_without_image_or_label_are_bad_records_of_their_own(tmp_path):
    images = [*kept(b"zero"), None, *kept(b"two", b"three")]
    source = data.open_source("huggingface", save(tmp_path, table(images, [0, 1, None, -1])))
    assert source.read_one(0) == (b"zero", 0)
    for row, reason in ((1, "holds neither"), (2, "has no label"), (3, "label -1 is not one of 3")):
        with pytest.raises(BadRecord, match=f"train, offset {row}: {reason}"):
            source.read_one(row)


def arrays():
    return table([np.zeros((4, 4, 3)).tolist()], [0], datasets.Array3D((4, 4, 3), "uint8"))


REFUSED = {
    "nothing": (lambda d: None, "no such directory"),
    "an empty directory": (lambda d: d.mkdir(), r"holds no train split \(train\) .*DatasetDict"),
    "one split": (lambda d: small().save_to_disk(d), r"is one Dataset without splits.*train_test_split.*DatasetDict\("),
    "no validation": (
        lambda d: small().save_to_disk(d / "train"),
        r"no validation split \(validation or val or test\)",
    ),
    "text labels": (
        lambda d: save(d, small(("a", "b", "c"), label=datasets.Value("string"))),
        r'column label holds string, not class numbers.*class_encode_column\("label"\)',
    ),
    "fractions": (lambda d: save(d, small(label=datasets.Value("float32"))), "holds float32, not class numbers"),
    "several labels": (
        lambda d: save(d, small([[0], [1], [2]], label=datasets.List(INTEGER))),
        "holds List",
    ),
    "no image": (lambda d: save(d, small(names=("text", "label"))), r"needs an image column.*has text, label"),
    "no label": (lambda d: save(d, small(names=("image", "age"))), r"needs .*a label column.*has image, age"),
    "pixels": (lambda d: save(d, arrays()), r"column image holds Array3D, not encoded images.*datasets.Image\(\)"),
    "no rows": (lambda d: save(d, small().select([])), "holds no rows"),
}


# What is wrong with one file of the training split, and what is said about it.
DAMAGED = {
    "cut": ("data-00001-of-00002.arrow", lambda content: content[:100], "data-00001-of-00002.arrow: is cut short"),
    "no end": ("data-00001-of-00002.arrow", lambda content: content[:-8], "data-00001-of-00002.arrow: is cut short"),
    "empty": ("data-00001-of-00002.arrow", lambda content: b"", "data-00001-of-00002.arrow: is cut short"),
    "lost": ("data-00001-of-00002.arrow", None, "train: cannot be read .*No such file.*data-00001-of-00002.arrow"),
    "no files in the state": ("state.json", lambda content: b"{}", "train: cannot be read .*_data_files"),
    "no features": ("dataset_info.json", lambda content: b"no", "train: cannot be read"),
}


def refusal(directory, message):
    """Opening one of the splits ends in one line."""
    with pytest.raises(UserError, match=message) as caught:
        for split in data.SPLITS:
            data.open_source("huggingface", str(directory), split)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_gets_one_line(case, tmp_path):
    make, message = REFUSED[case]
    make(tmp_path / "set")
    refusal(tmp_path / "set", message)


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(case, tmp_path):
    name, damage, message = DAMAGED[case]
    save(tmp_path, small(), num_shards={"train": 2, "validation": 1})
    path = tmp_path / "train" / name
    content = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
    refusal(tmp_path, message)


def test_a_missing_package_is_named(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="--dataset=huggingface: needs Hugging Face's datasets"):
        data.open_source("huggingface", str(whole[0]))


def test_reading_shows_no_progress_and_uses_no_network(tmp_path, capsys, monkeypatch):
    rows = table(kept(*[b"image"] * 20), [0] * 20)
    save(tmp_path, rows, num_shards={"train": 20, "validation": 1})  # from 17 files on the package shows a bar
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    capsys.readouterr()
    everything(data.open_source("huggingface", str(tmp_path)))
    assert capsys.readouterr() == ("", "")
    datasets.load_from_disk(tmp_path)
    assert "Loading dataset" in capsys.readouterr().err


def test_a_saved_set_can_be_checked(whole, capsys):
    assert program.main(["check", "--dataset=huggingface", f"--data_dir={whole[0]}", "--workers=1"]) == 0
    assert "41 of 41 images" in capsys.readouterr().err
