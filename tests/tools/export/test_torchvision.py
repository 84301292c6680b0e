"""Weights in torchvision's names and layouts, against an oracle that is written with them."""

import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybrid_imagenet.checkpoints import pretrained
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools import export_forms
from tests.references import torchvision_reference
from tests.tools.export.support import assert_close, network, pixels, reference, tensors


@pytest.mark.parametrize(("name", "size"), [("resnet18", 32), ("resnet50", 64)])
def test_imported_weights_give_torchvisions_outputs(tmp_path, name, size):
    images = pixels(1, size)
    assert_close(export_forms.outputs(network(tmp_path, name, size))(images), reference(images, name))


@pytest.mark.parametrize("name", ["resnet34", "resnet101"])
def test_every_depth_is_recognized(tmp_path, name):
    loaded = network(tmp_path, name)
    assert loaded.model == name
    assert len(loaded.weights) == sum(not key.endswith("num_batches_tracked") for key in tensors(name))


def test_a_file_of_another_network_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"features.0.weight": np.zeros((2, 2), np.float32)}, path)
    with pytest.raises(UserError, match=r"features\.0\.weight"):
        pretrained.load(path, print)
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read as a safetensors file"):
        pretrained.load(path, print)


def test_pytorch_itself_agrees(tmp_path):
    torch = pytest.importorskip("torch")
    module = torchvision_reference.torch_network(torch, 7)
    state = {key: torch.from_numpy(value) for key, value in tensors("resnet50").items()}
    module.load_state_dict(state)
    torch.save(module.state_dict(), tmp_path / "resnet50.pth")
    loaded = network(tmp_path, "resnet50", 64, weights=pretrained.load(tmp_path / "resnet50.pth", print).weights)
    images = pixels(1, 64)
    assert_close(export_forms.outputs(loaded)(images), reference(images, "resnet50"))
    normal = torch.from_numpy(loaded.preprocess(images).numpy().transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        assert_close(module(normal).numpy(), reference(images, "resnet50"))


class _Trap:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_no_object_of_a_pickle_is_built(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    path = tmp_path / "trap.pth"
    torch.save({"conv1.weight": _Trap()}, path)
    with pytest.raises(UserError, match="cannot be read as weights"):
        pretrained.load(path, print)
    path.write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(UserError, match="cannot be read as weights"):
        pretrained.load(path, print)
    assert "unpickled" not in capsys.readouterr().out
