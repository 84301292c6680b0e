"""What --dataset takes; listings alone show whether a dataset can be opened, and no image is read
for it.
"""

import re

import pytest

from hybrid_imagenet.data import datasets
from hybrid_imagenet.data.datasets import DatasetRequest
from hybrid_imagenet.errors import UserError
from tests.ranks import ROOT


def probe(name, place=None, splits=datasets.SPLITS, **options):
    return datasets.probe_splits(
        DatasetRequest(name, None if place is None else str(place), **options), splits
    )


def test_the_page_names_sources_that_exist():
    table = (ROOT / "docs" / "input.md").read_text().partition("## Check")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(names) >= 10
    assert names <= {*datasets.SOURCES}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("folder", "has no directory train"),
        ("tfrecord", "holds no train shards"),
        ("webdataset", "holds no train tar files"),
        ("parquet", "holds no train Parquet files"),
        ("idx", "has no train-images-idx3-ubyte"),
    ],
)
def test_an_empty_directory_is_refused_for_every_source(tmp_path, name, text):
    with pytest.raises(UserError, match=text):
        probe(name, tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        probe(name, tmp_path / "gone")
    with pytest.raises(UserError, match="--data_dir"):
        probe(name)


def test_a_folder_tells_its_classes_and_images_stay_unread(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog", "owl"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.png").write_text("no image")
    assert probe("folder", tmp_path).num_classes == 3
    (tmp_path / "val" / "elk").mkdir()
    with pytest.raises(UserError, match="no class 'elk'"):
        probe("folder", tmp_path)
    probe("folder", tmp_path, ("train",))


def test_a_url_is_not_asked(tmp_path):
    found = probe("parquet", "https://ann:hunter2@no-such-host.invalid/x", cache_dir=str(tmp_path))
    assert found.num_classes is None
    assert found.description == "https://***@no-such-host.invalid/x is read when training starts"


def test_fashion_mnist_in_a_directory_is_found_there(tmp_path):
    for prefix in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (tmp_path / f"{prefix}-{kind}-ubyte.gz").touch()
    assert probe("fashion_mnist", tmp_path).num_classes == 10
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match="t10k-labels"):
        probe("fashion_mnist", tmp_path)


@pytest.mark.parametrize("name", ["synthetic", "tfrecord"])
def test_num_classes_beyond_what_memory_holds_is_refused_by_probe_and_open(name, tmp_path):
    request = DatasetRequest(
        name, str(tmp_path) if name == "tfrecord" else None, num_classes=100_000_000
    )
    for call in (request.probe, request.open):
        with pytest.raises(
            UserError, match=r"--num_classes=100000000 must be at most 1,000,000, because"
        ):
            call()
