"""Divergence for real: two ranks whose learning rate is far too high go back, and finish with a lower one."""

from tests.support import program

SMALL = ("--model=resnet8", "--model_width=4", "--image_size=8")
FLAGS = (
    *("--optimizer=sgd", "--lr=40", "--log_every_steps=1", "--checkpoint_every_steps=1", "--divergence_factor=8"),
    *SMALL,
)
FACTOR = 1e-3


def test_a_diverged_run_goes_back_and_on_with_a_lower_rate(pools, tiny_data, tmp_path):
    run_dir = tmp_path / "run"
    rollback = ("--rollback=2", f"--rollback_lr_factor={FACTOR}")
    done = program.train_on(pools[2], tiny_data, run_dir, *FLAGS, *rollback)
    assert done.returncode == 0, done.stdout + done.stderr
    records = program.records(run_dir)
    [back] = [r for r in records if r["kind"] == "rollback"]
    assert back["rollbacks"] == 1
    assert "diverged" not in {r["kind"] for r in records}  # taken back with the steps
    assert back["learning_rate_factor"] == FACTOR
    assert back["step"] < back["diverged_step"] <= 12
    assert done.stdout.count("training diverged at step") == 1
    epochs = [r for r in records if r["kind"] == "epoch"]
    assert [(r["epoch"], r["step"]) for r in epochs] == [(1, 4), (2, 8), (3, 12)]
    assert epochs[-1]["train_loss"] < 12
    rate = epochs[0]["learning_rate"]
    assert rate <= 2 * 40 * FACTOR
    # The lower rate is part of the checkpoint: a run that is resumed keeps it, here on one rank.
    done = program.train_here(tiny_data, run_dir, *FLAGS, *rollback, "--epochs=4", "--resume", "--lr_decay=1")
    assert done.returncode == 0, done.stdout + done.stderr
    last = program.records(run_dir)[-1]
    assert last["learning_rate"] == 40 * FACTOR
    # Without any of these flags: nothing is fetched or saved before the end of the first epoch.
    quiet = ("--optimizer=sgd", "--lr=1000", "--log_every_steps=1000", *SMALL)
    done = program.train_here(tiny_data, tmp_path / "stops", *quiet)
    assert done.returncode == 3
    assert done.stderr.count("error:") == 1
    assert "training has diverged; lower --lr" in done.stderr
    assert not list((tmp_path / "stops").glob("checkpoints/step-*"))
    [end] = program.records(tmp_path / "stops")
    assert end["kind"] == "diverged" and end["step"] > 0
