import json
import sys
import types
from unittest import mock

import pytest

from benchmarks.__main__ import PEERS
from hybrid_imagenet.benchmarks import step


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_implementations_take_turns_and_the_report_holds_ours_and_each_peer(tmp_path, capsys, precision):
    path = tmp_path / "step.json"
    arguments = ["--batch=2", "--image_size=32", "--steps=1", "--rounds=2", "--threads=1", "--peers=keras"]
    assert step.main([*arguments, f"--precision={precision}", f"--json={path}"], PEERS["step"]) == 0
    report = json.loads(path.read_text())
    peer = report["peers"]["keras"]
    assert report["images_per_second"] > 0 and report["peak_bytes"] > 2**26
    assert peer["ratio"] == report["images_per_second"] / peer["images_per_second"]
    assert (report["benchmark"], report["batch"], report["precision"]) == ("step", 2, precision)
    assert "times as fast" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_of_fit_is_compared_with_the_programs(tmp_path, capsys):
    path = tmp_path / "step.json"
    arguments = ["--batch=4", "--image_size=28", "--steps=2", "--rounds=2", "--threads=1", "--precision=float32"]
    network = ["--model=resnet8", "--model_width=16", "--stem=3x3", "--num_classes=10"]
    assert step.main([*arguments, *network, "--through=fit", f"--json={path}"]) == 0
    report = json.loads(path.read_text())
    fit = report["variants"]["fit"]
    assert fit["time"] == fit["seconds_per_step"] / report["seconds_per_step"]
    assert report["peers"] == {}
    assert "x the time of the program's step" in capsys.readouterr().out


class Measured:
    """A implementation that has taken its turns."""

    def __init__(self, name, batch, seconds, cpu, peak):
        self.name, self.batch, self.rounds, self.cpu_rounds = name, batch, seconds, cpu
        self.peak_bytes, self.description, self.starts = peak, {"version": "1"}, []
        self.result = types.MethodType(step.Implementation.result, self)


def test_the_report_holds_medians_and_our_advantage(capsys):
    settings = dict.fromkeys(step.SETTINGS, 1) | {"batch": 8}
    ours = Measured("hybrid", 8, [3.0, 1.0, 2.0], [4.0, 4.0, 5.0], 100)
    fit = Measured("fit", 8, [5.0], [12.0], 60)
    fit.result = lambda: step.Implementation.result(fit) | {"start_seconds": 1.0}
    report = step.summarize([ours, Measured("keras", 8, [4.0], [6.0], 300), fit], settings)
    assert (report["images_per_second"], report["best_seconds_per_step"]) == (4.0, 1.0)
    assert report["peers"]["keras"]["ratio"] == 2.0
    assert (report["variants"]["fit"]["cost"], report["variants"]["fit"]["time"]) == (12 / 4, 5 / 2)
    step.print_table(report)
    assert "ours is 2.00 times as fast" in capsys.readouterr().out


def test_a_step_of_fit_is_what_further_steps_add():
    implementation = Measured("fit", 8, [], [], 100)
    # A call takes 3 s before its first step, and each step 2 s.
    implementation._timed = lambda steps: (3.0 + 2.0 * steps, 1.0 + 4.0 * steps)
    step.Implementation.run_apart(implementation, 10)
    result = implementation.result()
    assert (result["seconds_per_step"], result["cpu_seconds_per_step"], result["start_seconds"]) == (2.0, 4.0, 3.0)


def test_a_small_network_is_compared_with_the_peers_that_have_it(tmp_path, capsys):
    path = tmp_path / "step.json"
    arguments = ["--batch=4", "--image_size=28", "--steps=1", "--rounds=2", "--threads=1", "--precision=float32"]
    network = ["--model=resnet8", "--model_width=16", "--stem=3x3", "--num_classes=10"]
    assert step.main([*arguments, *network, "--peers=keras,torch", f"--json={path}"], PEERS["step"]) == 0
    report, out = json.loads(path.read_text()), capsys.readouterr().out
    assert (report["model"], report["width"], report["stem"], report["num_classes"]) == ("resnet8", 16, "3x3", 10)
    assert "keras: skipped, keras.applications has no such ResNet" in out
    assert "keras" not in report["peers"]
    assert "torch" in report["peers"] or "torch: skipped, PyTorch is not installed here" in out


def test_a_peer_whose_framework_is_absent_is_skipped_with_a_message(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')")
    with mock.patch.dict("os.environ", PYTHONPATH=str(tmp_path)):
        settings = {"batch": 1, "image_size": 32, "precision": "float32", "threads": 1, "model": "resnet50"}
        implementation = step.Implementation("torch", sys.executable, settings, PEERS["step"]["torch"])
        implementation.end()
    assert "--torch_python=PATH" in implementation.description["skipped"]
