"""Weights under timm's names are read, and its variants are rejected.

The names and shapes were compared with those of timm 1.0. The logits of its random resnet18, 34 and
50 were equal within 1e-6 of their largest value.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import torchvision

VARIABLES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def normalization(prefix):
    return {f"{prefix}.{variable}": np.ones(4, np.float32) for variable in VARIABLES}


def convolution(prefix, *shape):
    return {f"{prefix}.weight": np.full(shape or (4, 4, 1, 1), 2, np.float32)}


def state_dict(blocks=(2, 2, 2, 2), bottleneck=False):
    """Returns tensors under timm's names; only the first kernels have their true shapes."""
    tensors = {**convolution("conv1", 64, 3, 7, 7), **normalization("bn1")}
    for stage, count in enumerate(blocks, 1):
        for block in range(count):
            prefix = f"layer{stage}.{block}"
            for number in range(1, 4 if bottleneck else 3):
                tensors |= convolution(f"{prefix}.conv{number}", 64, 64, 1, 1)
                tensors |= normalization(f"{prefix}.bn{number}")
            if block == 0 and (stage > 1 or bottleneck):
                tensors |= convolution(f"{prefix}.downsample.0")
                tensors |= normalization(f"{prefix}.downsample.1")
    tensors["fc.weight"] = np.arange(8, dtype=np.float32).reshape(2, 4)
    tensors["fc.bias"] = np.zeros(2, np.float32)
    return tensors


def read(tmp_path, tensors, log=lambda line: None):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return torchvision.read(path, log)


@pytest.mark.parametrize(
    ("blocks", "bottleneck", "model"),
    [
        ((2, 2, 2, 2), False, "resnet18"),
        ((3, 4, 6, 3), False, "resnet34"),
        ((3, 4, 6, 3), True, "resnet50"),
        ((3, 4, 23, 3), True, "resnet101"),
        ((3, 8, 36, 3), True, "resnet152"),
    ],
)
def test_read_finds_the_network_of_timm_names(tmp_path, blocks, bottleneck, model):
    name, weights = read(tmp_path, state_dict(blocks, bottleneck))
    assert name == model
    assert weights["stem_conv/kernel"].shape == (7, 7, 3, 64)
    assert weights["logits/kernel"].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


VARIANTS = {
    "resnet50d": (convolution("conv1.0"), "its stem has three convolutions"),
    "resnet50c": (convolution("layer1.0.downsample.2"), "its shortcuts pool"),
    "seresnet50": (convolution("layer1.0.se.fc1"), "its blocks have channel attention"),
    "resnext50_32x4d": (convolution("layer1.0.conv2", 64, 2, 3, 3), "have 32 groups"),
    "wide_resnet50_2": (
        convolution("layer1.0.conv1", 128, 64, 1, 1)
        | convolution("layer1.0.conv2", 128, 128, 3, 3),
        "its blocks are 128 channels wide instead of 64",
    ),
    "in_chans=1": (convolution("conv1", 64, 1, 7, 7), "its images have 1 channels"),
    "other": (convolution("layer4.0.extra"), r"it also has layer4\.0\.extra\.weight, compared"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_read_rejects_a_variant_and_names_the_difference(tmp_path, variant):
    tensors, difference = VARIANTS[variant]
    with pytest.raises(UserError, match=rf"holds another network: .*{difference}.*\. Pass weights"):
        read(tmp_path, state_dict((3, 4, 6, 3), bottleneck=True) | tensors)


@pytest.mark.parametrize(
    ("missing", "difference"),
    [
        ("running_", "no running averages"),
        ("fc.", "no classifier"),
        ("layer3.0.bn1.bias", r"it lacks layer3\.0\.bn1\.bias, compared with resnet18"),
        ("layer4.1.", "it has 2-2-2-1 basic blocks in its stages"),
        ("conv1.", r"it has no conv1\.weight, but bn1\.bias"),
        ("", "it has no tensors"),
    ],
)
def test_read_of_a_file_with_missing_tensors_names_them(tmp_path, missing, difference):
    tensors = {name: value for name, value in state_dict().items() if missing not in name}
    with pytest.raises(UserError, match=difference):
        read(tmp_path, tensors)


@pytest.mark.parametrize(
    ("architecture", "accepted"),
    [
        ("resnet18", True),
        ("resnet18.a1_in1k", True),
        ("tv_resnet34", True),
        ("resnetblur18", False),
        ("resnetaa18", False),
        ("resnet18d", False),
    ],
)
def test_read_checks_the_architecture_that_config_json_names(tmp_path, architecture, accepted):
    # timm's blurring networks have the tensors of plain ones, but other logits.
    (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture}))
    if accepted:
        assert read(tmp_path, state_dict())[0] == "resnet18"
    else:
        with pytest.raises(UserError, match=f"names {architecture}\\. Pass weights"):
            read(tmp_path, state_dict())


@pytest.mark.parametrize("config", [None, {}, {"architecture": "resnet18"}])
def test_read_of_a_file_without_architecture_warns_of_the_assumed_network(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    lines = []
    read(tmp_path, state_dict(), lines.append)
    if config:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(
            f"{tmp_path}/model.safetensors does not name its network, so it is read as resnet18."
        )
