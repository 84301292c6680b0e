"""Preempts the batch scripts for Slurm, with a stub for its commands."""

import os
import signal
import subprocess
import sys

import pytest

from tests.launch.shell import LAUNCH, ROOT
from tests.support import processes, program

SAVING_SCRIPT = """
import pathlib, signal, sys, time
from hybrid_imagenet.cluster import job_lines

folder = pathlib.Path(sys.argv[1])

def leave(number, frame):
    sys.exit(75)

signal.signal(signal.SIGUSR1, leave)
if sys.argv[2] == "saves":
    job_lines.notify_checkpoint()
(folder / f"started-{len(list(folder.iterdir()))}").touch()
time.sleep(300)
"""


@pytest.fixture
def preemptible_job(tmp_path):
    """Returns variables of a job with one rank, under a stub scheduler that logs `requeue`."""
    stub = tmp_path / "bin" / "scontrol"
    stub.parent.mkdir()
    stub.write_text(
        f"#!/bin/sh\ntest $1 = show && echo localhost || echo $@ >>{tmp_path}/requeued\n"
    )
    stub.chmod(0o755)
    return program.environment() | {
        "PATH": f"{stub.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "HYBRID_IMAGENET_VENV": sys.prefix,
    }


def preempt(command, environment, has_started, number):
    """Starts a batch script, sends it a signal once it trains; returns its code and output."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        processes.wait_for(lambda: has_started() or process.poll() is not None, 120)
        # Slurm signals the batch shell only.
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.parametrize(
    ("saves", "number", "code", "is_requeued"),
    [
        ("saves", signal.SIGUSR1, 0, True),
        # It would be queued again forever.
        ("unsaved", signal.SIGUSR1, 75, False),
        # Slurm cancels a job by this signal.
        ("saves", signal.SIGTERM, 75, False),
    ],
)
def test_slurm_example_is_queued_again_after_a_preemption(
    saves, number, code, is_requeued, tmp_path, preemptible_job
):
    script = tmp_path / "saving.py"
    script.write_text(SAVING_SCRIPT)
    folder = tmp_path / "started"
    folder.mkdir()
    command = ["bash", ROOT / "examples" / "slurm.sh", script, folder, saves]
    job_code, output = preempt(command, preemptible_job, lambda: list(folder.iterdir()), number)
    assert job_code == code, output
    requeued = tmp_path / "requeued"
    assert requeued.exists() == is_requeued, output
    if is_requeued:
        assert requeued.read_text() == "requeue 7\n"
    elif saves == "saves":
        assert output.endswith(
            f"next: hybrid-imagenet run --preempted 'scontrol requeue 7' -H"
            f" localhost:1 {script} {folder} saves\n"
        )


def test_slurm_script_of_the_program_is_queued_again_and_continues(tmp_path, preemptible_job):
    data = program.make_data(tmp_path)
    run_dir = tmp_path / "run"
    flags = [*program.FLAGS, "--recipe=hybrid", f"--data_dir={data}", f"--run_dir={run_dir}"]
    command = ["bash", LAUNCH / "slurm.sh", *flags, "--epochs=9999"]
    for start in range(2):
        steps_before = len(program.records(run_dir))
        code, output = preempt(
            command,
            preemptible_job,
            lambda steps=steps_before: len(program.records(run_dir)) > steps + 2,
            signal.SIGUSR1,
        )
        assert code == 0, output
        assert ("resumed at epoch" in output) == (start == 1), output
    assert (tmp_path / "requeued").read_text() == "requeue 7\nrequeue 7\n"
