"""Listings alone show whether a dataset can be opened, and no image is read for it."""

import pytest

from hybrid_imagenet.data import quick_check
from hybrid_imagenet.errors import UserError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("folder", "has no directory train"),
        ("tfrecord", "holds no train shards"),
        ("webdataset", "holds no train tar files"),
        ("parquet", "holds no train Parquet files"),
        ("huggingface", "holds no train split"),
        ("idx", "has no train-images-idx3-ubyte"),
    ],
)
def test_an_empty_directory_is_refused_for_every_source(tmp_path, name, text):
    with pytest.raises(UserError, match=text):
        quick_check.look(name, str(tmp_path))
    with pytest.raises(UserError, match="no such directory"):
        quick_check.look(name, str(tmp_path / "gone"))
    with pytest.raises(UserError, match="--data_dir"):
        quick_check.look(name)


def test_a_folder_tells_its_classes_and_images_stay_unread(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog", "owl"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.png").write_text("no image")
    assert quick_check.look("folder", str(tmp_path)).classes == 3
    (tmp_path / "val" / "elk").mkdir()
    with pytest.raises(UserError, match="elk: no class of this name"):
        quick_check.look("folder", str(tmp_path))
    quick_check.look("folder", str(tmp_path), splits=("train",))


def test_files_of_both_splits_are_needed(tmp_path):
    (tmp_path / "train-000000.tar").touch()
    quick_check.look("webdataset", str(tmp_path), splits=("train",))
    with pytest.raises(UserError, match="holds no validation tar files"):
        quick_check.look("webdataset", str(tmp_path))


def test_a_url_is_not_asked(tmp_path):
    look = quick_check.look("parquet", "https://ann:hunter2@no-such-host.invalid/x", cache_dir=str(tmp_path))
    assert look.classes is None
    assert look.text == "https://***@no-such-host.invalid/x is read when training starts"


def test_fashion_mnist_in_a_directory_is_found_there(tmp_path):
    for prefix in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (tmp_path / f"{prefix}-{kind}-ubyte.gz").touch()
    assert quick_check.look("fashion_mnist", str(tmp_path)).classes == 10
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match="t10k-labels"):
        quick_check.look("fashion_mnist", str(tmp_path))
