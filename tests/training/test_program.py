"""The whole program on real ranks: equal updates, results, resuming, signals, bad input."""

import json
import os
import shutil
import signal

import numpy as np
import pytest

from hybrid_imagenet.tools import evaluate
from hybrid_imagenet.tools.report import classes, load
from tests.runlog.test_tensorboard import events
from tests.support import program
from tests.training import programs


@pytest.fixture(scope="module")
def one_process():
    return programs.four_steps(1)


def assert_equal(values, reference):
    for ours, theirs in zip(values, reference, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_ranks_equal_one_large_batch(pools, one_process, ranks, micro):
    for values in pools[ranks].call(programs.four_steps, micro):
        assert_equal(values, one_process)


def test_micro_batches_equal_one_large_batch(one_process):
    assert_equal(programs.four_steps(4), one_process)


def test_a_run_leaves_its_results(undisturbed):
    run_dir, output = undisturbed
    summary = json.loads((run_dir / "summary.json").read_text())
    epochs = [r for r in program.records(run_dir) if r["kind"] == "epoch"]
    assert [r["epoch"] for r in epochs] == [1, 2, 3]
    assert [r["step"] for r in epochs] == [4, 8, 12]
    assert all(r["val_count"] == program.VALIDATION for r in epochs)
    assert [r["image_size"] for r in epochs] == [12, 16, 16]
    assert [r["phase"] for r in epochs] == [0.0, 1.0, 1.0]
    assert [round(r["learning_rate"], 6) for r in epochs] == [0.2, 0.2, 0.18]
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
    assert output.count(" 3/3 |") == 1  # rank 0 alone speaks


def test_a_run_keeps_what_it_found_for_each_image(undisturbed):
    run_dir, _ = undisturbed
    images = load.load_run(run_dir).image_results
    found = classes.confusion_matrix(images)
    assert found.sum() == len(images["label"]) == program.VALIDATION
    assert np.trace(found) / found.sum() == pytest.approx(program.records(run_dir)[-1]["val_top1"])
    assert len(images["worst_files"]) == min(20, found.sum() - np.trace(found))
    assert not list(run_dir.glob("*.tmp"))


def test_a_run_writes_its_values_for_tensorboard(undisturbed):
    found = {(step, tag) for step, tag, _, _ in events(undisturbed[0] / "tensorboard")}
    ends = [
        record["step"] for record in program.records(undisturbed[0]) if record["kind"] == "epoch"
    ]
    assert {(end, "validation/top1") for end in ends} <= found


def test_a_profile_is_written_for_tensorboard(undisturbed):
    run_dir, output = undisturbed
    assert len(list((run_dir / "profile").glob("plugins/profile/*/*.xplane.pb"))) == 1
    assert output.count("profile of steps 3 to 5: tensorboard --logdir=") == 1  # rank 0 alone


def test_evaluation_takes_the_averaged_weights_that_validation_saw(tiny_data, undisturbed, capsys):
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


def test_resumed_between_the_last_step_of_an_epoch_and_its_end(tiny_data, tmp_path):
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
    after_training.unlink()  # what stays was saved before the second epoch's validation
    done = program.train_here(tiny_data, resumed_run, *flags, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at epoch 2.000, step 8" in done.stdout
    assert "class weights: from 1 (class 0) to 1 (class 0)" in done.stdout
    expected, ours = program.without_times(expected_run), program.without_times(resumed_run)
    assert expected == ours
    assert {"learning_rate", "trust_ratios"} <= set(ours[-1])
    arrays = program.arrays(resumed_run)
    assert all(
        np.array_equal(value, arrays[name]) for name, value in program.arrays(expected_run).items()
    )


def test_a_bad_validation_image_ends_the_run_when_its_epoch_is_saved(pools, tiny_data, tmp_path):
    data, run_dir = shutil.copytree(tiny_data, tmp_path / "data"), tmp_path / "run"
    places = program.damage(data)[2:]
    for shard in tiny_data.glob("train-*"):
        shutil.copy(shard, data)
    done = program.train_on(pools[2], data, run_dir)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2
    assert any(place in error for place in places)
    # The ranks of the pool, which live on, hold the lock of their run but not that of a copy.
    run_dir = shutil.copytree(run_dir, tmp_path / "resumed")
    done = program.train_here(data, run_dir, "--resume", "--bad_records=skip")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at epoch 1.000" in done.stdout
    epochs = [record for record in program.records(run_dir) if record["kind"] == "epoch"]
    assert [(r["epoch"], r["val_dropped"]) for r in epochs] == [(1, 2), (2, 2), (3, 2)]
    assert epochs[0]["train_count"] == program.TRAIN


def test_what_is_given_with_a_resume_holds_and_the_warmup_does_not_begin_again(tiny_data, tmp_path):
    first = ("--hybrid_ramp_epochs=4", "--loss_scale=dynamic", "--epochs=2")
    done = program.train_here(tiny_data, tmp_path, *first)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 0 < program.records(tmp_path)[-1]["lars_share"] < 1
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
    assert "lars_share" not in last
    assert min(last["trust_ratios"].values()) != 1  # all are 1 where LARS is off
    done = program.train_here(tiny_data, tmp_path, "--resume", "--loss_scale=8")
    assert "the run was over at step" in done.stdout
    assert json.loads((tmp_path / "config.json").read_text())["flags"]["loss_scale"] == "4", (
        "of the last step"
    )


def test_a_signal_saves_and_the_run_goes_on_with_other_ranks(tmp_path):
    """On damaged data: each bad record counts once over all ranks, each dropped image once per
    epoch.
    """
    run_dir = tmp_path / "stopped"
    data = program.make_data(tmp_path / "data")
    places = program.damage(data)
    (data / "extra-00000-of-00001").touch()
    flags = ("--checkpoint_every_epochs=50", "--nokeep_best", "--bad_records=skip")
    running = program.Running(2, data, run_dir, "--epochs=100", *flags)
    running.wait_for_step(6)
    os.kill(running.process.pid, signal.SIGUSR1)  # which mpirun passes on to its ranks
    code, output = running.finish()
    assert code == 75, output
    (saved,) = (run_dir / "checkpoints").iterdir()
    stopped_at = int(saved.stem.removeprefix("step-"))
    assert json.loads((run_dir / "summary.json").read_text())["stop"] == "preempted"
    assert all(place in output for place in places)
    assert output.count("1 skipped, neither train nor validation by their names") == 1
    # On one rank from here: what was read before counts in examples, 16 per step on 2 ranks and 8
    # on 1.
    last = stopped_at * 16 // program.TRAIN + 2
    done = program.train_here(data, run_dir, "--resume", f"--epochs={last}", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"resumed at epoch {stopped_at * 16 / program.TRAIN:.3f}, step {stopped_at}" in done.stdout
    )
    epochs = [r for r in program.records(run_dir) if r["kind"] == "epoch"]
    assert [r["epoch"] for r in epochs] == list(range(1, last + 1))
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
        2 * last,
        2,
        2,
    )
