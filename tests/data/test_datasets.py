"""Tests the names of datasets, and the check for a dataset's files without reading images."""

import re

import pytest

from hybrid_imagenet.data import datasets
from hybrid_imagenet.data.datasets import DatasetRequest
from hybrid_imagenet.errors import UserError
from tests.ranks import ROOT


def probe(name, directory=None, splits=datasets.SPLITS, **options):
    return datasets.probe_splits(
        DatasetRequest(name, None if directory is None else str(directory), **options), splits
    )


def test_input_page_names_existing_sources():
    table = (ROOT / "docs" / "input.md").read_text().partition("## Check")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert names
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
def test_probe_of_an_empty_directory_raises_for_every_source(tmp_path, name, text):
    with pytest.raises(UserError, match=text):
        probe(name, tmp_path)
    with pytest.raises(UserError, match="is not a directory"):
        probe(name, tmp_path / "gone")
    with pytest.raises(UserError, match="--data_dir"):
        probe(name)


def test_probe_of_a_folder_counts_classes_without_reading_images(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog", "owl"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.png").write_text("no image")
    assert probe("folder", tmp_path).num_classes == 3
    (tmp_path / "val" / "elk").mkdir()
    with pytest.raises(UserError, match="no class 'elk'"):
        probe("folder", tmp_path)
    probe("folder", tmp_path, ("train",))


def test_probe_of_a_url_sends_no_request(tmp_path):
    summary = probe(
        "parquet", "https://ann:hunter2@no-such-host.invalid/x", cache_dir=str(tmp_path)
    )
    assert summary.num_classes is None
    assert summary.description == "https://***@no-such-host.invalid/x is read when training starts"


def test_probe_finds_fashion_mnist_in_a_directory(tmp_path):
    for prefix in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (tmp_path / f"{prefix}-{kind}-ubyte.gz").touch()
    assert probe("fashion_mnist", tmp_path).num_classes == 10
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match="t10k-labels"):
        probe("fashion_mnist", tmp_path)


@pytest.mark.parametrize("name", ["synthetic", "tfrecord"])
def test_probe_and_open_reject_more_classes_than_fit_into_memory(name, tmp_path):
    request = DatasetRequest(
        name, str(tmp_path) if name == "tfrecord" else None, num_classes=100_000_000
    )
    for call in (request.probe, request.open):
        with pytest.raises(
            UserError, match=r"--num_classes=100000000 must be at most 1,000,000, because"
        ):
            call()
