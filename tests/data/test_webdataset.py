"""Tests WebDataset tar files in a directory, written by the webdataset package."""

import io
import json
import os
import subprocess
import tarfile

import numpy as np
import pytest

from hybrid_imagenet import files
from hybrid_imagenet.data import datasets, pipeline
from hybrid_imagenet.data.sources import webdataset
from hybrid_imagenet.data.sources.source import BadRecord
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.order.shard_order import ShardOrder
from tests.data import support
from tests.data.test_sources import cache  # noqa: F401


def as_json(number, image, label):
    return {
        "__key__": f"{number:05d}",
        "png": image,
        "left.png": b"not the image",
        "json": {"text": "jpg", "label": label},
    }


def write(directory, form=support.as_cls, per_file=3):
    """Writes the tiny dataset into 5 and 2 files."""
    directory.mkdir(parents=True)
    for split in datasets.SPLITS:
        support.write_tars(directory, f"tiny-{split}", support.tiny(split), per_file, form)
    return directory


@pytest.mark.parametrize("form", [support.as_cls, as_json])
@pytest.mark.parametrize("info", [False, True])
def test_webdataset_source_returns_images_and_labels_as_written(form, info, tmp_path):
    directory = write(tmp_path / "set", form)
    if info:
        support.write_info(directory)
    for split, sizes in (("train", [3, 3, 3, 3, 2]), ("validation", [3, 2])):
        source = datasets.open_source("webdataset", str(directory), split)
        images, labels = source.read(np.arange(source.num_examples))
        assert list(zip(images, labels.tolist(), strict=True)) == support.tiny(split)
        assert source.class_names == ("0", "1", "2")
        assert source.shard_sizes.tolist() == sizes
        assert source.reads.bytes_read == sum(map(len, images))
        file, offset = source.locate(4)
        with tarfile.open(file) as archive:
            assert offset in [member.offset for member in archive]


def test_webdataset_source_reads_class_names_and_directories_of_splits(tmp_path):
    directory = write(tmp_path / "set")
    (directory / "labels.txt").write_text("cat\ndog\nowl\n")
    for split, name in (("train", "train"), ("validation", "val")):
        (directory / name).mkdir()
        for path in directory.glob(f"*-{split}-*.tar"):
            path.rename(directory / name / path.name.rpartition("-")[2])
    for split in datasets.SPLITS:
        source = datasets.open_source("webdataset", str(directory), split)
        assert source.class_names == ("cat", "dog", "owl")
        assert source.num_examples == len(support.tiny(split))


def tar(path, files):
    with tarfile.open(path, "w") as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_webdataset_source_recognizes_files_of_a_sample_by_the_whole_extension(tmp_path):
    image, _ = support.tiny("train")[0]
    # The header of a tar file has space for shorter names only, so this one gets an extra header.
    long = "d" * 120 + "/" + "n" * 120
    tar(
        tmp_path / "train-0.tar",
        [
            ("README", b"no suffix"),
            ("__meta__.json", b"{}"),
            ("a.b/1.seg.png", b"another image"),
            ("a.b/1.bbox.json", b'{"label": 0}'),
            ("a.b/1.cls", b"1\n"),
            ("a.b/1.json", b'{"label": 1, "width": 24}'),
            ("a.b/1.jpg", image),
            ("a.b/1.depth.png", b"a third image"),
            (f"{long}.jpg", image),
            (f"{long}.cls", b"2"),
        ],
    )
    source = datasets.open_source("webdataset", str(tmp_path))
    assert [source.read_one(number) for number in range(source.num_examples)] == [
        (image, 1),
        (image, 2),
    ]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([("1.cls", b"1")], "lacks an image"),
        ([("1.depth.png", b"x"), ("1.cls", b"1")], "lacks an image"),
        ([("1.jpg", b"x")], "lacks a label"),
        ([("1.jpg", b"x"), ("1.bbox.json", b'{"label": 1}')], "lacks a label"),
        ([("1.jpg", b"x"), ("1.cls", b"1" + b"0" * 20)], "lacks a label"),
        ([("1.jpg", b"x"), ("1.cls", b"cat")], "lacks a label"),
        ([("1.jpg", b"x"), ("1.cls", b"[0, 0, 1]")], "the label is a list, as one-hot"),
        ([("1.jpg", b"x"), ("1.cls", b"0 1\n")], "the label is a list"),
        ([("1.jpg", b"x"), ("1.cls", b"0,0,1")], "the label is a list"),
        ([("1.jpg", b"x"), ("1.json", b'{"label": [0, 1]}')], "the label is a list"),
        ([("1.jpg", b"x"), ("1.json", b'{"label": [0, 1], "cls": 1}')], "the label is a list"),
        (
            [("1.jpg", b"x"), ("1.cls", b"1"), ("1.json", b'{"label": [0, 1]}')],
            "the label is a list",
        ),
        (
            [("1.jpg", b"x"), ("1.json", b'{"label": [0, 1]}'), ("1.cls", b"1")],
            "the label is a list",
        ),
        ([("1.jpg", b"x"), ("1.cls", b"3")], "label 3 is not one of 2 classes"),
    ],
)
def test_webdataset_sample_that_cannot_be_used_is_a_bad_record(files, reason, tmp_path):
    tar(tmp_path / "train-0.tar", [("0.jpg", b"x"), ("0.cls", b"0"), *files])
    source = datasets.open_source("webdataset", str(tmp_path), num_classes=2)
    assert source.read_one(0) == (b"x", 0)
    with pytest.raises(BadRecord, match=reason) as error:
        source.read_one(1)
    assert error.value.offset == 2048


def tar_with_links(path, members):
    """Writes (name, content) as files, and (name, kind, target) as links."""
    with tarfile.open(path, "w") as archive:
        for name, *rest in members:
            member = tarfile.TarInfo(name)
            if len(rest) == 1:
                member.size = len(rest[0])
                archive.addfile(member, io.BytesIO(rest[0]))
            else:
                member.type, member.linkname = rest
                archive.addfile(member)


def test_webdataset_source_follows_links_inside_the_archive(tmp_path):
    tar_with_links(
        tmp_path / "train-0.tar",
        [
            ("./a/0.jpg", b"first"),
            ("./a/0.cls", b"0"),
            ("./b/1.jpg", tarfile.LNKTYPE, "./a/0.jpg"),
            ("./b/1.cls", b"1"),
            ("./b/2.jpg", tarfile.SYMTYPE, "../c/3.jpg"),
            ("./b/2.cls", tarfile.SYMTYPE, "1.cls"),
            ("./c/3.jpg", b"last"),
            ("./c/3.cls", b"2"),
            ("./c/4.jpg", tarfile.SYMTYPE, "../b/2.jpg"),
            ("./c/4.cls", tarfile.LNKTYPE, "a/0.cls"),
        ],
    )
    source = datasets.open_source("webdataset", str(tmp_path))
    examples = [source.read_one(number) for number in range(source.num_examples)]
    assert examples == [(b"first", 0), (b"first", 1), (b"last", 1), (b"last", 2), (b"last", 0)]


@pytest.mark.parametrize(
    ("members", "file_with_link"),
    [
        ([("1.jpg", tarfile.SYMTYPE, "/photos/1.jpg"), ("1.cls", b"1")], "image"),
        ([("1.jpg", tarfile.LNKTYPE, "gone.jpg"), ("1.cls", b"1")], "image"),
        ([("1.jpg", tarfile.SYMTYPE, "1.jpg"), ("1.cls", b"1")], "image"),
        ([("1.jpg", b"x"), ("1.cls", tarfile.SYMTYPE, "../../labels/1.cls")], "label"),
    ],
)
def test_webdataset_link_to_a_file_outside_the_archive_is_a_bad_record(
    members, file_with_link, tmp_path
):
    tar_with_links(tmp_path / "train-0.tar", [("0.jpg", b"x"), ("0.cls", b"0"), *members])
    source = datasets.open_source("webdataset", str(tmp_path), num_classes=2)
    assert source.read_one(0) == (b"x", 0)
    with pytest.raises(
        BadRecord,
        match=f"its {file_with_link} is a link to a file that the archive does not hold"
        ".*dereference",
    ):
        source.read_one(1)


def test_webdataset_tar_with_a_sparse_file_raises(tmp_path):
    with (tmp_path / "0.png").open("wb") as file:
        file.truncate(1 << 20)
    (tmp_path / "0.cls").write_text("0")
    subprocess.run(
        ["tar", "--sparse", "-cf", "train-0.tar", "0.png", "0.cls"], cwd=tmp_path, check=True
    )
    with pytest.raises(
        UserError, match=r"train-0.tar: 0.png is stored as a sparse file: write the archive without"
    ):
        datasets.open_source("webdataset", str(tmp_path))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("1.jpg", b"x"), ("1.png", b"y"), ("1.cls", b"1")], "two images, 1.jpg and 1.png"),
        ([("1.jpg", b"x"), ("1.cls", b"1"), ("1.jpg", b"y")], "two images, 1.jpg and 1.jpg"),
        (
            [("1.json", b'{"label": 1}'), ("1.cls", b"2"), ("1.jpg", b"x")],
            "two labels, 1.json and 1.cls",
        ),
        ([("1.json", b'{"label": 1, "cls": 2}'), ("1.jpg", b"x")], "two labels, 1.json and 1.json"),
    ],
)
def test_webdataset_sample_with_two_images_or_labels_raises(files, message, tmp_path):
    tar(tmp_path / "train-0.tar", [("0.jpg", b"x"), ("0.cls", b"0"), *files])
    with pytest.raises(
        UserError, match=rf"train-0.tar: a sample has {message}: leave one"
    ) as error:
        datasets.open_source("webdataset", str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_webdataset_tar_that_is_compressed_raises(mode, tmp_path):
    with tarfile.open(tmp_path / "train-0.tar", f"w:{mode}") as archive:
        archive.addfile(tarfile.TarInfo("0.cls"))
    with pytest.raises(
        UserError,
        match=r"train-0.tar: .* is compressed \((GZIP|BZIP2|XZ)\).* (gzip|bzip2|xz) -dc < FILE",
    ):
        datasets.open_source("webdataset", str(tmp_path))


def test_webdataset_tar_files_that_were_joined_raise(tmp_path):
    directory = write(tmp_path / "set")
    first = directory / "tiny-train-0000.tar"
    second = directory / "tiny-train-0001.tar"
    end = first.stat().st_size
    first.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(
        UserError, match=rf"0000.tar: offset {end}: more follows the end of the archive"
    ):
        datasets.open_source("webdataset", str(directory))


def damaged_tar(content, begin, damage):
    """Returns the damaged content of a tar file whose samples start at the offsets `begin`."""
    if damage == "cut in an image":
        return content[: begin[1] + 700]
    if damage == "cut in a header":
        return content[: begin[2] + 1]
    if damage == "cut in the last image":
        return content[: begin[2] + 2048 + 100]
    if damage == "flipped bit in a header":
        at = begin[2] + 10
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    # A copy that reserves its space leaves zeros when it is interrupted.
    assert damage == "zeros"
    return content[: begin[2]] + bytes(5 << 20)


@pytest.mark.parametrize("info", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        "cut in an image",
        "cut in a header",
        "cut in the last image",
        "flipped bit in a header",
        "zeros",
    ],
)
def test_webdataset_tar_that_is_cut_or_damaged_raises_the_offset(damage, info, tmp_path):
    directory = write(tmp_path / "set")
    if info:
        support.write_info(directory)
    path = directory / "tiny-train-0001.tar"
    begin = webdataset.scan_tar(path).begin
    path.write_bytes(damaged_tar(path.read_bytes(), begin, damage))
    with pytest.raises(UserError, match=r"0001.tar: offset \d+: .*restore"):
        datasets.open_source("webdataset", str(directory))


@pytest.fixture
def scans(monkeypatch):
    """Collects the names of the tar files that are scanned."""
    names = []
    scan_tar = webdataset.scan_tar

    def recorded_scan(path):
        names.append(path.name)
        return scan_tar(path)

    monkeypatch.setattr(webdataset, "scan_tar", recorded_scan)
    return names


def test_index_of_a_tar_is_cached_until_the_file_changes(scans, tmp_path):
    directory = write(tmp_path / "set")
    datasets.open_source("webdataset", str(directory))
    scans.clear()
    datasets.open_source("webdataset", str(directory))
    assert not scans
    path = directory / "tiny-train-0002.tar"
    for label in (0, 1):
        before = path.stat()
        tar(path, [("0.jpg", b"x"), ("0.cls", b"%d" % label)])
        # rsync -t and reproducible archives keep the time of the file.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        source = datasets.open_source("webdataset", str(directory))
        assert source.num_examples == 12
        indices = [index for index in range(12) if source.locate(index)[0] == str(path)]
        assert [source.read_one(index)[1] for index in indices] == [label]
    assert scans == ["tiny-train-0002.tar"] * 2


def test_index_of_a_tar_by_an_older_version_is_built_again(scans, tmp_path):
    directory = write(tmp_path / "set")
    datasets.open_source("webdataset", str(directory))
    path = directory / "tiny-train-0002.tar"
    cache_file = files.cached_index_path("tar", webdataset._INDEX_VERSION, files=[path])
    with np.load(cache_file) as stored:
        columns = dict(stored)
    columns["version"] -= 1
    np.savez(cache_file, **columns)
    scans.clear()
    datasets.open_source("webdataset", str(directory))
    assert scans == ["tiny-train-0002.tar"]


def test_tar_with_another_number_of_samples_than_listed_raises(tmp_path):
    directory = write(tmp_path / "set")
    support.write_info(directory)
    listed = json.loads((directory / "_info.json").read_text())
    # The validation split needs its list, but the training split does not.
    del listed["splits"]["validation"]["filenames"]
    (directory / "_info.json").write_text(json.dumps(listed))
    assert datasets.open_source("webdataset", str(directory)).num_examples > 0
    support.write_info(directory, shard_lengths=[3, 3, 4, 3, 2])
    with pytest.raises(UserError, match=r"0002.tar holds 3 samples, but _info.json says 4"):
        datasets.open_source("webdataset", str(directory))


def test_webdataset_epoch_has_each_image_once_and_prefetches_its_window(tmp_path):
    directory = write(tmp_path / "set")
    source = datasets.open_source("webdataset", str(directory))
    order = ShardOrder(source.shard_sizes, 2, seed=3)
    requests = []
    source.prefetch = lambda shards: requests.append(tuple(shards))
    batches = pipeline.training_batches(
        source, order, Cursor(), (2, 1), epochs=1, image_size=8, augmentation="none",
        options=pipeline.HostOptions(readers=1),
    )  # fmt: skip
    labels = [label for batch in batches for label in batch["label"].numpy().tolist()]
    examples = order.at(0, np.arange(14))
    assert sorted(examples.tolist()) == list(range(14))
    assert labels == [support.tiny("train")[number][1] for number in examples]
    shard = np.repeat(np.arange(5), source.shard_sizes)
    assert len(requests) == 7
    for step, shards in enumerate(requests):
        assert set(shard[examples[2 * step : 2 * step + 2]]) <= set(shards)
