import json
import subprocess

import pytest

from benchmarks import start
from hybrid_imagenet.errors import UserError

FLAGS = [
    "--dataset=digits",
    "--augmentation=digits",
    "--model=resnet8",
    "--image_size=16",
    "--per_gpu_batch=4",
]


@pytest.mark.slow
def test_bench_start_measures_help_and_the_first_step(tmp_path):
    path = tmp_path / "start.json"
    assert start.main(["--launcher=", f"--json={path}", "--", *FLAGS]) == 0
    report = json.loads(path.read_text())
    assert 0 < report["help_seconds"] < report["first_step_seconds"]
    assert report["flags"] == FLAGS
    assert {
        "loading TensorFlow",
        "reading the dataset",
        "building the model",
        "compiling the step",
    } <= set(report["stages"])
    assert sum(report["stages"].values()) == pytest.approx(report["first_step_seconds"], rel=0.05)


def test_first_step_of_a_job_that_fails_raises_the_reason():
    with pytest.raises(UserError, match="is not installed"):
        start.first_step(start.job("/nowhere/run", FLAGS), 60)
    with pytest.raises(UserError, match=r"before its first step.*--model=resnet5"):
        start.first_step(start.job("", ["--model=resnet5"]), 60)


def test_job_without_a_launcher_uses_the_launch_script(monkeypatch):
    monkeypatch.setattr(
        start.subprocess, "run", lambda *words, **options: subprocess.CompletedProcess(words, 0)
    )
    assert start.job(None, ["--epochs=1"])[0].endswith("launch/local.sh")
    assert start.job("hybrid-imagenet run -np 2 --", FLAGS) == [
        "hybrid-imagenet",
        "run",
        "-np",
        "2",
        "--",
        *FLAGS,
    ]
    monkeypatch.setattr(
        start.subprocess, "run", lambda *words, **options: subprocess.CompletedProcess(words, 1)
    )
    with pytest.raises(UserError, match=r"setup.sh failed"):
        start.job(None, [])
