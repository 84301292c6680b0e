import json
import sys
import types
from unittest import mock

import pytest

from benchmarks import step_rate as step
from hybrid_imagenet import config, run_plan
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import build


class Measured:
    """Replaces an implementation that has been measured."""

    def __init__(self, name, batch, seconds, cpu, peak):
        self.name = name
        self.batch = batch
        self.rounds = seconds
        self.cpu_rounds = cpu
        self.peak_bytes = peak
        self.description = {"version": "1"}
        self.result = types.MethodType(step.Implementation.result, self)


def test_bench_step_reports_medians_and_ratios_to_peers(capsys):
    settings = dict.fromkeys(step.SETTINGS, 1) | {"batch": 8}
    ours = Measured("hybrid", 8, [3.0, 1.0, 2.0], [4.0, 4.0, 5.0], 100)
    report = step.summarize([ours, Measured("keras", 8, [4.0], [6.0], 300)], settings)
    assert (report["images_per_second"], report["best_seconds_per_step"]) == (4.0, 1.0)
    assert report["peers"]["keras"]["ratio"] == 2.0
    step.print_table(report)
    assert "ours is 2.00 times as fast" in capsys.readouterr().out


def test_bench_step_measures_the_layers_that_a_run_trains():
    from benchmarks import _step_program

    settings = {"model": "resnet8", "num_classes": 10, "image_size": 32, "width": 16}
    measured = _step_program.build_network({**settings, "stem": "imagenet", "precision": "float32"})
    flags = ["--model=resnet8", "--image_size=32", "--model_width=16"]
    plan = run_plan.make(config.resolve(flags), "float32")
    trained = build.model(plan, 10, SingleProcess())
    assert [type(layer) for layer in measured.layers] == [type(layer) for layer in trained.layers]


@pytest.mark.slow
def test_bench_step_of_a_small_network_skips_peers_without_it(tmp_path, capsys):
    path = tmp_path / "step.json"
    arguments = [
        "--batch=4",
        "--image_size=28",
        "--steps=1",
        "--rounds=2",
        "--threads=1",
        "--precision=float32",
    ]
    network = ["--model=resnet8", "--model_width=16", "--stem=3x3", "--num_classes=10"]
    assert step.main([*arguments, *network, "--peers=keras,torch", f"--json={path}"]) == 0
    report, out = json.loads(path.read_text()), capsys.readouterr().out
    assert (report["model"], report["width"], report["stem"], report["num_classes"]) == (
        "resnet8",
        16,
        "3x3",
        10,
    )
    assert "keras: skipped, keras.applications has no such ResNet" in out
    assert "keras" not in report["peers"]
    assert "torch" in report["peers"] or "torch: skipped, PyTorch is not installed for" in out


def test_bench_step_without_pytorch_skips_that_peer_with_a_message(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')")
    with mock.patch.dict("os.environ", PYTHONPATH=str(tmp_path)):
        settings = {
            "batch": 1,
            "image_size": 32,
            "precision": "float32",
            "threads": 1,
            "model": "resnet50",
        }
        implementation = step.Implementation("torch", sys.executable, settings, step.PEERS["torch"])
        implementation.end()
    assert "--torch_python=PYTHON" in implementation.description["skipped"]


def test_implementation_whose_interpreter_is_missing_raises_the_path():
    settings = dict.fromkeys(step.SETTINGS, 1)
    with pytest.raises(UserError, match="interpreter /nowhere/python for torch cannot be run"):
        step.Implementation("torch", "/nowhere/python", settings, step.PEERS["torch"])
