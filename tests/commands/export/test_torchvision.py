"""Tests weights in torchvision's names and layouts against a reference that uses them."""

import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybrid_imagenet.checkpoints import pretrained
from hybrid_imagenet.commands import export_formats
from hybrid_imagenet.errors import UserError
from tests.commands.export.support import assert_close, network, pixels, reference, tensors


@pytest.mark.parametrize(("name", "size"), [("resnet18", 32), ("resnet50", 64)])
def test_load_of_torchvision_weights_gives_the_reference_logits(tmp_path, name, size):
    images = pixels(1, size)
    assert_close(
        export_formats.logits_function(network(tmp_path, name, size))(images),
        reference(images, name),
    )


def test_load_of_torchvision_weights_recognizes_the_depth(tmp_path):
    loaded = network(tmp_path, "resnet34")
    assert loaded.model == "resnet34"
    assert len(loaded.weights) == sum(
        not key.endswith("num_batches_tracked") for key in tensors("resnet34")
    )


def test_load_of_weights_of_another_network_raises(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"features.0.weight": np.zeros((2, 2), np.float32)}, path)
    with pytest.raises(UserError, match=r"features\.0\.weight"):
        pretrained.load(path, print)
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read as a safetensors file"):
        pretrained.load(path, print)


class _Trap:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_load_of_a_pickle_builds_no_objects(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    path = tmp_path / "trap.pth"
    torch.save({"conv1.weight": _Trap()}, path)
    with pytest.raises(UserError, match="cannot be read as weights"):
        pretrained.load(path, print)
    path.write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(UserError, match="cannot be read as weights"):
        pretrained.load(path, print)
    assert "unpickled" not in capsys.readouterr().out
