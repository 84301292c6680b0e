import json

import pytest

from hybrid_imagenet.benchmarks import table
from hybrid_imagenet.errors import UserError

PLAIN = {"batch": 16, "image_size": 224, "precision": "float32"}
STEP = PLAIN | {
    "benchmark": "step",
    "images_per_second": 14.0,
    "peak_bytes": 3 * 2**30,
    "peers": {
        "keras": {"images_per_second": 10.0, "peak_bytes": 2 * 2**30, "ratio": 1.4},
        "torch": {"images_per_second": 14.0, "peak_bytes": 4 * 2**30, "ratio": 1.0},
    },
    "variants": {"recompute": {"batch": 16, "cost": 1.3, "memory": 0.7}},
}
LOOP = PLAIN | {
    "benchmark": "loop",
    "ratio": 0.99,
    "host_milliseconds": 2.0,
    "dispatch_milliseconds": 0.5,
    "data_wait_fraction": 0.01,
    "validation": {"share_of_training": 0.25},
    "checkpoint": {"blocked_seconds": 0.2, "steps_meanwhile": 3},
}
JOB = {"precision": "float32", "batch_per_rank": 16, "step_seconds": 2.0, "exposed_seconds": 0.1}
SCALING = [
    JOB | {"ranks": 1, "images_per_second": 10.0},
    JOB | {"ranks": 2, "images_per_second": 12.0},
    {"name": "peers/horovod_keras_2", "ranks": 2, "precision": "float32", "images_per_second": 6.0, "ratio": 2.0},
]
START = {"benchmark": "start", "help_seconds": 0.5, "first_step_seconds": 30.0, "launcher": "mpirun -np 2"}
OPTIMIZER = {"benchmark": "optimizer", "contestants": {"lars": {"ratio": 1.2}, "keras SGD": {"ratio": 1.0}}}
GROUP = {"milliseconds": 3.0, "bound": 2.0, "flops": 1.0, "bytes": 1.0}
ROOFLINE = {"benchmark": "roofline", "step_milliseconds": 3.0, "groups": {"update": GROUP}} | PLAIN


def scores(*reports):
    return {row.measure.partition(" (")[0]: row.score for row in table.rows(reports)}


def test_each_measure_is_held_against_its_aim():
    found = scores(STEP, LOOP, SCALING, START, OPTIMIZER)
    step, loop = "FP32 step, batch 16, 224 px", "FP32 loop, batch 16, 224 px"
    expected = {
        f"{step}: ours over stock Keras": 1.0,
        f"{step}: ours over PyTorch": 1.0 / 1.4,
        f"{step}: peak memory, ours over stock Keras": 1 / 1.5,
        f"{step}: peak memory, ours over PyTorch": None,
        f"{loop}: images per second over the bare step's": 0.99 / 0.98,
        f"{loop}: host time per step": 0.4,
        f"{loop}: validation over training, per image": 4 / 3,
        f"{loop}: steps while the checkpoint is written": 3.0,
        "update of 161 tensors, lars, over Keras's SGD with momentum": 1.3 / 1.2,
        "FP32, batch 16 per rank, 2 ranks over 1 rank on the same cores, images per second": 1.2,
        "2 ranks, FP32: ours over Horovod with legacy Keras in FP32": 2 / 1.5,
        "--help": 2.0,
        "first step after launch, `mpirun -np 2`": 25 / 30,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_bf16_has_aims_of_its_own():
    found = scores(STEP | {"precision": "mixed_bfloat16"})
    assert found["BF16 step, batch 16, 224 px: ours over PyTorch"] == pytest.approx(1 / 1.25)
    assert found["BF16 step, batch 16, 224 px: ours over stock Keras"] == pytest.approx(1.4 / 2)


def test_the_table_and_the_plots(tmp_path, capsys):
    for number, report in enumerate((STEP, LOOP, SCALING, START, OPTIMIZER, ROOFLINE)):
        (tmp_path / f"{number}.json").write_text(json.dumps(report))
    assert table.main([str(tmp_path), f"--plots={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| 5 | --help | at most 1 s | 0.5 s | yes |" in lines
    assert sum("**no**" in line for line in lines) == 4
    for name in ("goals.png", "roofline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_directory_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match="give the directory"):
        table.load(tmp_path)
    (tmp_path / "a.json").write_text("no")
    with pytest.raises(UserError, match="not a JSON file"):
        table.load(tmp_path)
