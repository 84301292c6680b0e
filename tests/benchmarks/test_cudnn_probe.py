import collections

import keras

from hybrid_imagenet.models import factory
from tests.launch.shell import ROOT, error_line, run

LAYERS = ROOT / "dev" / "cudnn_probe" / "resnet50.txt"
PROBE = ROOT / "dev" / "cudnn_probe.sh"


def use_of(name):
    """Returns whether the input of a convolution is normalized first, and what its output is."""
    part = name.removesuffix("_conv").rpartition("_")[2]
    if part == "stem":
        return "image", "stem"
    if part == "shortcut":
        return "plain", "shortcut"
    return "plain" if part == "1" else "normalized", "join" if part == "3" else "inner"


def test_layers_of_the_probe_are_the_convolutions_of_resnet50():
    listed = collections.Counter()
    for line in LAYERS.read_text().splitlines():
        if not line.startswith("#"):
            _, count, *shape, source, target = line.split()
            listed[(*map(int, shape), source, target)] = int(count)
    # No initial weights are computed in this scope.
    with keras.StatelessScope():
        model = factory.create("resnet50", 1000, 224)
    expected = collections.Counter()
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            size, _, channels, filters = layer.kernel.shape
            side = layer.input.shape[1]
            stride = side // layer.output.shape[1]
            expected[(channels, side, filters, size, stride, *use_of(layer.name))] += 1
    assert listed == expected
    assert listed.total() == 53


def test_cudnn_probe_dry_run_prints_layers_and_compiler(tmp_path):
    result = run(PROBE, "--dry-run", f"--packages={tmp_path}")
    assert result.returncode == 0
    assert result.stdout.startswith(LAYERS.read_text())
    assert f"-isystem {tmp_path}/nvidia/cudnn/include" in result.stdout
    assert "-l:libnvrtc.so.12" in result.stdout


def test_cudnn_probe_without_headers_names_the_missing_file(tmp_path):
    result = run(PROBE, f"--packages={tmp_path}", f"--out={tmp_path / 'out'}")
    assert result.returncode == 1
    assert f"{tmp_path}/include/cudnn_frontend.h is missing. See dev/" in error_line(result)
    assert not (tmp_path / "out").exists()
