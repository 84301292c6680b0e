"""What a checkpoint says of itself is read without its arrays; other files are named for what they are."""

import zipfile

import numpy as np
import pytest

from hybrid_imagenet.checkpoints import archive, glance
from hybrid_imagenet.errors import UserError


def test_the_newest_readable_checkpoint_of_a_run_is_described(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (1, 2):
        archive.write(folder / f"step-{step:09d}.npz", {"x": np.zeros(1)}, {"model": f"resnet{step}"})
    (folder / "step-000000003.npz").write_bytes(b"cut short")
    for path in (tmp_path, folder):
        assert glance.look(path).meta["model"] == "resnet2"
    assert glance.look(folder / "step-000000001.npz").meta["model"] == "resnet1"


def test_files_of_other_libraries_have_no_description(tmp_path):
    (tmp_path / "weights.pth").touch()
    assert glance.look(tmp_path / "weights.pth").meta == {}


def test_a_model_that_keras_has_saved_is_called_so(tmp_path):
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            file.writestr(name, "{}")
    with pytest.raises(UserError, match=r"model.keras: a model that Keras has saved.*keras.saving.load_model"):
        glance.look(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("none", "no such file"), ("text", "not a checkpoint"), ("folder", "holds no usable checkpoint")],
)
def test_what_is_no_checkpoint_is_one_line(tmp_path, name, text):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=text):
        glance.look(tmp_path / name)
