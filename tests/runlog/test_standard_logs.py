import json
import subprocess
import sys
import types

import pytest

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import standard_logs, trackers

CONFIG = {
    "flags": {"model": "resnet50", "per_gpu_batch": 32, "seed": 3, "target_top1": [0.75], "lr": 0.1,
              "weight_decay": 1e-4,
              "optimizer": "hybrid", "dataset": "digits"},
    "world_size": 2, "gpu": "none", "cpu": "some CPU", "tensorflow": "2.21.0", "train_images": 1000,
    "validation_images": 100, "started": 1_700_000_000.0,
    "launched": 1_699_999_980.0, "peak_learning_rate": 0.2,
}  # fmt: skip


def records(top1=(0.5, 0.8)):
    rows, seconds = [], 0.0
    for epoch, value in enumerate(top1, 1):
        seconds += 36.0
        rows.append({"kind": "step", "epoch": epoch, "step": 10 * epoch - 5, "train_loss": 1.0, "learning_rate": 0.1,
                     "upper_bound": None, "trust_ratios": {"conv1": 0.01, "fc": None}})  # fmt: skip
        rows.append({"kind": "epoch", "epoch": epoch, "step": 10 * epoch, "seconds": seconds, "validation_seconds": 6.0,
                     "train_loss": 0.9, "val_top1": value, "val_top5": value + 0.1, "val_loss": 1.1})  # fmt: skip
    return rows


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records()))
    return tmp_path


def test_dawnbench_table_is_in_hours_and_percent():
    assert standard_logs.dawnbench_tsv(records()).splitlines() == [
        "epoch\thours\ttop1Accuracy\ttop5Accuracy",
        "1\t0.01000000\t50.0000\t60.0000",
        "2\t0.02000000\t80.0000\t90.0000",
    ]


def test_dawnbench_leaves_out_epochs_without_validation():
    rows = records()
    del rows[1]["val_top1"]
    assert [line.split("\t")[0] for line in standard_logs.dawnbench_tsv(rows).splitlines()[1:]] == ["2"]


@pytest.mark.parametrize("rules", [standard_logs.MLPERF_RULES, "1.0.0", "0.7.0"])
def test_official_checker_passes_the_log(run_dir, rules):
    log = next(path for path in standard_logs.write(run_dir) if path.name == "mlperf.log")
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", rules,
               "--log_output", str(run_dir / "checker.txt"), str(log)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "SUCCESS" in result.stderr, result.stderr
    assert result.returncode == 0
    assert "WARNING" not in result.stderr


def test_official_checker_rejects_a_log_without_its_end(run_dir):
    log = next(path for path in standard_logs.write(run_dir) if path.name == "mlperf.log")
    log.write_text("".join(line for line in log.read_text().splitlines(True) if "run_stop" not in line))
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", standard_logs.MLPERF_RULES,
               "--log_output", str(run_dir / "checker.txt"), str(log)]  # fmt: skip
    assert subprocess.run(command, capture_output=True, timeout=120).returncode != 0


def parsed(text):
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]


def test_mlperf_times_and_values():
    lines = parsed(standard_logs.mlperf_log(records(), CONFIG | {"launched": 980.0}, 1000.0))
    times = [line["time_ms"] for line in lines]
    assert times == sorted(set(times)), "each event has a time of its own"
    bounds = {line["key"]: line["time_ms"] for line in lines if line["key"].startswith(("init", "run"))}
    assert (bounds["init_start"], bounds["run_start"]) == (980_000, 1_000_001)
    accuracies = [(line["value"], line["metadata"]["epoch_num"], line["time_ms"])
                  for line in lines if line["key"] == "eval_accuracy"]  # fmt: skip
    assert accuracies == [(0.5, 1, 1_036_000), (0.8, 2, 1_072_000)]
    assert [line["time_ms"] for line in lines if line["key"] == "eval_start"] == [1_030_001, 1_066_001]
    by_key = {line["key"]: line["value"] for line in lines}
    assert (by_key["global_batch_size"], by_key["train_samples"], by_key["eval_samples"]) == (64, 1000, 100)
    assert by_key["opt_base_learning_rate"] == 0.2  # on all GPUs, not the 0.1 of the flag


def test_mlperf_run_stops_at_the_evaluation_that_met_the_target():
    lines = parsed(standard_logs.mlperf_log(records((0.5, 0.75, 0.9)), CONFIG, 1000.0))
    assert [line["value"] for line in lines if line["key"] == "eval_accuracy"] == [0.5, 0.75]
    assert (lines[-1]["key"], lines[-1]["metadata"]["status"]) == ("run_stop", "success")
    assert lines[-1]["time_ms"] == pytest.approx(1_072_000, abs=3)


@pytest.mark.parametrize(("top1", "status"), [((0.5, 0.75), "success"), ((0.5, 0.74), "aborted")])
def test_mlperf_status_follows_the_target(top1, status):
    assert parsed(standard_logs.mlperf_log(records(top1), CONFIG, 0.0))[-1]["metadata"]["status"] == status


@pytest.mark.parametrize("broken", ["config.json", "metrics.jsonl"])
def test_directory_without_a_run_is_one_line(run_dir, broken):
    (run_dir / broken).unlink()
    with pytest.raises(UserError, match=broken):
        standard_logs.write(run_dir)


def events(directory):
    import tensorflow as tf
    from tensorflow.core.util import event_pb2

    (path,) = directory.iterdir()
    found = []
    for item in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        event = event_pb2.Event.FromString(item)
        found += [(event.step, value.tag, tf.make_ndarray(value.tensor), value.metadata.plugin_data.plugin_name)
                  for value in event.summary.value]  # fmt: skip
    return found


def test_tensorboard_files_hold_scalars_under_documented_tags(tmp_path):
    board = trackers.TensorBoard(str(tmp_path / "tb"))
    step, epoch = records()[:2]
    board.log(trackers.scalars(step), step["step"])
    board.log(trackers.scalars(epoch), epoch["step"])
    board.close()
    found = events(tmp_path / "tb")
    scalars = {(s, tag): float(v) for s, tag, v, plugin in found if plugin == "scalars"}
    assert scalars == {
        (5, "train/loss"): 1.0,
        (5, "optimizer/learning_rate"): pytest.approx(0.1),
        (5, "trust_ratio/conv1"): pytest.approx(0.01),
        (5, "learning_rate/conv1"): pytest.approx(0.001),
        (10, "epoch/train/loss"): pytest.approx(0.9),
        (10, "validation/loss"): pytest.approx(1.1),
        (10, "validation/top1"): 0.5,
        (10, "validation/top5"): pytest.approx(0.6),
    }


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_trackers_get_config_values_and_end(monkeypatch, name):
    calls = []
    functions = ("init", "start_run", "log", "log_params", "log_metrics", "finish", "end_run")
    module = types.SimpleNamespace(**{f: lambda *args, f=f, **named: calls.append((f, args, named)) for f in functions})
    monkeypatch.setitem(sys.modules, name, module)
    tracker = trackers.Tracker(name, "run-1", {"lr": 0.1})
    tracker.log(trackers.scalars(records()[1]), 10)
    tracker.close()
    assert "lr" in str(calls[0]) + str(calls[1])
    (logged,) = [call for call in calls if call[0] in ("log", "log_metrics")]
    assert logged[1][0]["validation/top1"] == 0.5
    assert logged[2] == {"step": 10}
    assert calls[-1][0] == {"wandb": "finish", "mlflow": "end_run"}[name]


def test_missing_tracker_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        trackers.Tracker("wandb", "x", {})
