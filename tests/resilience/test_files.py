"""Tests runs on full disks, in deleted directories, and two runs in the same directory."""

import json
import resource
import shutil

import pytest

from hybrid_imagenet.checkpoints import archive
from tests.data.support import jpeg
from tests.support import processes, program

FLAGS = ("--epochs=5000", "--optimizer=sgd")
# Two checkpoints of this network fill the disk.
LARGE = ("--model=resnet10", "--model_width=64", "--stem=imagenet")


def finish(run: program.Running) -> tuple[int, str]:
    """Returns the exit code and the only line that begins with `error:`; fails on a traceback."""
    try:
        code, output = run.finish()
    finally:
        if run.process.poll() is None:
            run.kill()
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    return code, errors[0]


def step_of_latest_checkpoint(run_dir) -> int:
    """Returns the step of the latest checkpoint; fails if an unfinished one is left."""
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert all(name.startswith("step-") for name in names)
    return archive.read(run_dir / "checkpoints" / names[-1]).meta["state"]["step"]


@pytest.mark.slow
def test_run_on_a_full_disk_exits_with_2_and_resumes_with_more_space(tiny_data, tmp_path):
    with processes.small_disk(tmp_path / "disk", 60) as remount:
        run_dir = tmp_path / "disk" / "run"
        run = program.Running(1, tiny_data, run_dir, *FLAGS, *LARGE)
        saved = (run_dir / "checkpoints").glob
        processes.wait_for(lambda: list(saved("step-*.npz")) or run.process.poll() is not None, 240)
        # Without the right to mount, a limit on the size of files replaces the full disk.
        if remount is None:
            resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))
        code, error = finish(run)
        assert code == 2
        # The first write that fails may be the one of a record.
        is_record = f"{run_dir}/metrics.jsonl cannot be written" in error
        assert is_record or f"A checkpoint could not be written to {run_dir}/" in error
        assert ("No space left on device" if remount else "File too large") in error
        assert "--resume" in error
        step = step_of_latest_checkpoint(run_dir)
        assert json.loads((run_dir / "config.json").read_text())["flags"]["epochs"] == 5000
        assert remount is None or remount("size=600m")
        flags = ("--optimizer=sgd", f"--epochs={step // 8 + 1}", "--resume", *LARGE)
        done = program.train_here(tiny_data, run_dir, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"step {step}" in done.stdout
        assert step_of_latest_checkpoint(run_dir) > step


def test_run_in_a_directory_in_use_or_deleted_exits_with_2(tiny_data, tmp_path):
    run_dir = tmp_path / "run"
    run = program.Running(
        1, tiny_data, run_dir, *FLAGS, "--checkpoint_every_epochs=100", "--nokeep_best"
    )
    run.wait_for_step(2)
    second = program.train_here(tiny_data, run_dir, "--resume")
    assert second.returncode == 2
    assert f"error: --run_dir={run_dir} is in use by another run" in second.stderr
    assert run.process.poll() is None
    shutil.rmtree(run_dir)
    code, error = finish(run)
    assert code == 2
    assert "was deleted during the run" in error
    assert not run_dir.exists()


def test_run_whose_images_are_deleted_exits_with_4_and_prints_the_directory(tmp_path):
    for split, count in (("train", 64), ("val", 8)):
        for number in range(count):
            path = tmp_path / "data" / split / f"class{number % 4}" / f"{number}.jpeg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(number, 40, 40))
    flags = ("--dataset=folder", "--num_classes=", "--checkpoint_every_epochs=100", "--nokeep_best")
    run = program.Running(1, tmp_path / "data", tmp_path / "run", *FLAGS, *flags)
    run.wait_for_step(4)
    shutil.rmtree(tmp_path / "data" / "train" / "class2")
    code, error = finish(run)
    # The directory may come back, like storage that stops answering for a while.
    assert code == 4
    assert all(
        word in error
        for word in ("class2: the directory", "No such file or directory", "Mount or restore it")
    )
    assert "--bad_records=skip" not in error
