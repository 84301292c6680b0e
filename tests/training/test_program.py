"""The whole program on real ranks: equal updates, results, resuming, signals, bad input."""

import json
import os
import shutil
import signal

import numpy as np
import pytest

from hybrid_imagenet.commands import evaluate
from hybrid_imagenet.commands.report import classes, load
from tests.runlog.test_tensorboard import events
from tests.support import program
from tests.training import programs


@pytest.fixture(scope="module")
def one_process():
    """Returns the weights after four steps in one process."""
    return programs.four_steps(1)


def assert_equal(values, reference):
    for ours, theirs in zip(values, reference, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_step_on_several_ranks_equals_one_large_batch(pools, one_process, ranks, micro):
    for values in pools[ranks].call(programs.four_steps, micro):
        assert_equal(values, one_process)


def test_step_of_micro_batches_equals_one_large_batch(one_process):
    assert_equal(programs.four_steps(4), one_process)


@pytest.mark.parametrize(("loss", "skipped"), [(1e-8, 0), (1.0, 0), (1e6, 16)])
def test_cluster_2_flags_train_with_gradients_of_any_size(pools, loss, skipped):
    """Computes in FP32 and sends FP16, which ends at 65504: 1e6 must be scaled by 2^-4."""
    for result in pools[2].call(programs.cluster_2_step, loss, 20):
        assert result["types"] == ["float32", "float16"]
        assert (result["skipped"], result["updates"]) == (skipped, 20 - skipped)
        ours, expected = result["norm"]
        assert ours == pytest.approx(expected, rel=2e-3)


def test_run_writes_records_summary_and_config(undisturbed):
    run_dir, output = undisturbed
    summary = json.loads((run_dir / "summary.json").read_text())
    epochs = [r for r in program.records(run_dir) if r["kind"] == "epoch"]
    assert [r["epoch"] for r in epochs] == [1, 2, 3]
    assert [r["step"] for r in epochs] == [4, 8, 12]
    assert all(r["val_count"] == program.VALIDATION for r in epochs)
    assert [r["image_size"] for r in epochs] == [12, 16, 16]
    assert [r["phase"] for r in epochs] == [0.0, 1.0, 1.0]
    assert [round(r["learning_rate"], 6) for r in epochs] == [0.2, 0.2, 0.18]
    # The run computes in FP32 and sends gradients in FP16 to the other rank.
    assert [(r["loss_scale"], r["skipped_steps"]) for r in epochs] == [(2**12, 0)] * 3
    assert summary["world_size"] == 2
    assert summary["epochs"] == 3
    assert summary["val_top1"] == epochs[-1]["val_top1"]
    assert {
        "val_top5",
        "best_val_top1",
        "val_loss",
        "epochs_to_target",
        "images_per_second",
        "wall_seconds",
    } <= set(summary)
    assert json.loads((run_dir / "config.json").read_text())["flags"]["per_gpu_batch"] == 8
    # Only rank 0 prints.
    assert output.count(" 3/3 |") == 1


def test_run_writes_results_for_each_validation_image(undisturbed):
    run_dir, _ = undisturbed
    images = load.load_run(run_dir).image_results
    matrix = classes.confusion_matrix(images)
    assert matrix.sum() == len(images["label"]) == program.VALIDATION
    assert np.trace(matrix) / matrix.sum() == pytest.approx(
        program.records(run_dir)[-1]["val_top1"]
    )
    assert len(images["worst_files"]) == min(20, matrix.sum() - np.trace(matrix))
    assert not list(run_dir.glob("*.tmp"))


def test_run_writes_values_for_tensorboard(undisturbed):
    written = {(step, tag) for step, tag, _, _ in events(undisturbed[0] / "tensorboard")}
    last_steps = [
        record["step"] for record in program.records(undisturbed[0]) if record["kind"] == "epoch"
    ]
    assert {(end, "validation/top1") for end in last_steps} <= written


def test_run_writes_a_profile_for_tensorboard(undisturbed):
    run_dir, output = undisturbed
    assert len(list((run_dir / "profile").glob("plugins/profile/*/*.xplane.pb"))) == 1
    # Only rank 0 prints.
    assert output.count("profile of steps 3 to 5: tensorboard --logdir=") == 1


def test_evaluate_uses_the_averaged_weights_of_validation(tiny_data, undisturbed, capsys):
    run_dir, _ = undisturbed
    last = [r for r in program.records(run_dir) if r["kind"] == "epoch"][-1]
    losses = {}
    for weights in ("auto", "ema", "trained"):
        arguments = [
            "--dataset=tfrecord",
            f"--data_dir={tiny_data}",
            "--precision=float32",
            "--json",
            f"--weights={weights}",
        ]
        assert evaluate.main([str(run_dir), *arguments]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["weights"] == ("trained" if weights == "trained" else "ema")
        losses[weights] = result["loss"]
    assert losses["auto"] == losses["ema"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert losses["trained"] != pytest.approx(last["val_loss"], rel=1e-4)


@pytest.mark.slow
def test_run_resumed_between_last_step_and_end_of_an_epoch_equals_one_run(tiny_data, tmp_path):
    flags = (
        *("--per_gpu_batch=16", "--image_size=8"),
        *("--checkpoint_every_steps=8", "--checkpoint_every_epochs=3", "--nokeep_best"),
        *("--mixup_alpha=0.4", "--cutmix_alpha=1", "--class_weights=balanced"),
    )
    expected_run = tmp_path / "run"
    done = program.train_here(tiny_data, expected_run, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    resumed_run = tmp_path / "resumed"
    shutil.copytree(expected_run, resumed_run)
    after_training, _ = sorted((resumed_run / "checkpoints").glob("step-*.npz"), reverse=True)
    # The remaining checkpoint was saved before the validation of the second epoch.
    after_training.unlink()
    done = program.train_here(tiny_data, resumed_run, *flags, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at epoch 2.000, step 8" in done.stdout
    assert "class weights: from 1 (class 0) to 1 (class 0)" in done.stdout
    expected = program.without_times(expected_run)
    ours = program.without_times(resumed_run)
    assert expected == ours
    assert {"learning_rate", "trust_ratios"} <= set(ours[-1])
    arrays = program.arrays(resumed_run)
    assert all(
        np.array_equal(value, arrays[name]) for name, value in program.arrays(expected_run).items()
    )


def test_run_with_a_bad_validation_image_ends_after_saving_the_epoch(pools, tiny_data, tmp_path):
    data = shutil.copytree(tiny_data, tmp_path / "data")
    run_dir = tmp_path / "run"
    locations = program.damage(data)[2:]
    for shard in tiny_data.glob("train-*"):
        shutil.copy(shard, data)
    done = program.train_on(pools[2], data, run_dir)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2
    assert any(location in error for location in locations)
    failure = program.records(run_dir)[-1]
    assert (failure["kind"], f"error: {failure['error']}") == ("failed", error)
    # The ranks of the pool still hold the lock of their run, so a copy of it is resumed.
    run_dir = shutil.copytree(run_dir, tmp_path / "resumed")
    done = program.train_here(data, run_dir, "--resume", "--bad_records=skip")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at epoch 1.000" in done.stdout
    epochs = [record for record in program.records(run_dir) if record["kind"] == "epoch"]
    assert [(r["epoch"], r["val_dropped"]) for r in epochs] == [(1, 2), (2, 2), (3, 2)]
    assert epochs[0]["train_count"] == program.TRAIN


@pytest.mark.slow
def test_run_resumed_with_other_flags_uses_them_without_a_second_warmup(tiny_data, tmp_path):
    first = ("--hybrid_ramp_epochs=4", "--loss_scale=dynamic", "--epochs=2")
    done = program.train_here(tiny_data, tmp_path, *first)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 0 < program.records(tmp_path)[-1]["trust_ratio_exponent"] < 1
    done = program.train_here(tiny_data, tmp_path, "--resume", "--warmup_epochs=2.5")
    assert (
        done.returncode,
        done.stderr.count("is past its warmup. Resume with the number of warmup epochs"),
    ) == (2, 1)
    done = program.train_here(
        tiny_data, tmp_path, "--resume", "--hybrid_ramp_epochs=0", "--loss_scale=4"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = program.records(tmp_path)[-1]
    assert last["loss_scale"] == 4
    assert "trust_ratio_exponent" not in last
    # All trust ratios are 1 if LARS is off.
    assert min(last["trust_ratios"].values()) != 1
    done = program.train_here(tiny_data, tmp_path, "--resume", "--loss_scale=8")
    assert "the run was over at step" in done.stdout
    # The file describes the last step, which had a scale of 4.
    assert json.loads((tmp_path / "config.json").read_text())["flags"]["loss_scale"] == "4"


def test_run_that_has_reached_its_target_trains_further_only_for_a_higher_one(tiny_data, tmp_path):
    def epochs(*flags):
        done = program.train_here(tiny_data, tmp_path, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / "summary.json").read_text())
        records = [r["epoch"] for r in program.records(tmp_path) if r["kind"] == "epoch"]
        return records, summary["stop"], done.stdout

    assert epochs("--stop_at_top1=0")[:2] == ([1], "target")
    *again, output = epochs("--resume")
    assert again == [[1], "target"]
    assert "the run reached --stop_at_top1=0 in epoch 1: raise it to train further" in output
    assert epochs("--resume", "--stop_at_top1=1", "--epochs=2")[0] == [1, 2]


def test_run_stopped_by_a_signal_saves_and_continues_on_one_rank(tmp_path):
    """Uses damaged data.

    Each bad record counts once over all ranks, and each dropped image counts once per epoch.
    """
    run_dir = tmp_path / "stopped"
    data = program.make_data(tmp_path / "data")
    locations = program.damage(data)
    (data / "extra-00000-of-00001").touch()
    flags = ("--checkpoint_every_epochs=50", "--nokeep_best", "--bad_records=skip")
    running = program.Running(2, data, run_dir, "--epochs=100", *flags)
    running.wait_for_step(6)
    # mpirun forwards the signal to its ranks.
    os.kill(running.process.pid, signal.SIGUSR1)
    code, output = running.finish()
    assert code == 75, output
    (saved,) = (run_dir / "checkpoints").iterdir()
    stopped_at = int(saved.stem.removeprefix("step-"))
    assert json.loads((run_dir / "summary.json").read_text())["stop"] == "preempted"
    assert all(location in output for location in locations)
    assert output.count("1 skipped, neither train nor validation by their names") == 1
    # The run continues on one rank. A step took 16 examples on 2 ranks, and takes 8 on one.
    last_epoch = stopped_at * 16 // program.TRAIN + 2
    done = program.train_here(data, run_dir, "--resume", f"--epochs={last_epoch}", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"resumed at epoch {stopped_at * 16 / program.TRAIN:.3f}, step {stopped_at}" in done.stdout
    )
    epochs = [r for r in program.records(run_dir) if r["kind"] == "epoch"]
    assert [r["epoch"] for r in epochs] == list(range(1, last_epoch + 1))
    later = [r for r in epochs if r["step"] > stopped_at]
    assert later
    assert all(
        r["step"] == stopped_at + r["epoch"] * program.TRAIN // 8 - stopped_at * 2 for r in later
    )
    assert {(r["train_count"], r["train_dropped"]) for r in epochs} == {(program.TRAIN - 2, 2)}
    assert {(r["val_count"], r["val_dropped"]) for r in epochs} == {(program.VALIDATION - 2, 2)}
    assert epochs[0]["bad_records"] == epochs[-1]["bad_records"] == 2
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["images_dropped"], summary["bad_records"], summary["val_dropped"]) == (
        2 * last_epoch,
        2,
        2,
    )
