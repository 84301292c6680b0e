"""Jobs of `fit` in separate processes: hung, killed, interrupted on a terminal, on two hosts."""

import contextlib
import importlib.util
import os
import pty
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hybrid_imagenet.errors import EXIT_STALLED, EXIT_USAGE
from tests.launch.shell import run
from tests.launch.test_lab import LAB, namespaces
from tests.ranks import ROOT, environment
from tests.support import processes, program

JOB = "tests/library/fit_job.py"
RUN = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "2"]


def job(kind, folder, limit=60):
    """Runs a job of two ranks to its end."""
    folder.mkdir(exist_ok=True)
    command = program.command(
        2, kind, str(limit), str(folder), start=("-m", "tests.library.fit_job")
    )
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=600
    )


def weights(folder):
    """Returns the final weights of a job, which are equal on both ranks."""
    first, second = (np.load(folder / f"weights-{rank}.npy") for rank in (0, 1))
    np.testing.assert_array_equal(first, second)
    return first


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = job("whole", folder)
    assert done.returncode == 0, done.stderr
    epochs = [line.split(",")[0] for line in (folder / "log.csv").read_text().splitlines()]
    # Only rank 0 has written.
    assert epochs == ["epoch", "0", "1", "2"]
    if importlib.util.find_spec("tensorboard") is not None:
        assert len(list((folder / "events" / "train").iterdir())) == 1
    return weights(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "state"), [("waits", "has made no progress"), ("stopped", "has been silent")]
)
def test_job_whose_rank_hangs_names_it_and_ends(kind, state, tmp_path):
    done = job(kind, tmp_path, 10)
    errors = done.stderr
    assert done.returncode == EXIT_STALLED, errors
    # Six steps are done: four of the first epoch and two of the second.
    where = r"\(last step: 6\)\. Python stack:\nstall: +\S*tests/library/fit_job.py:\d+ fail\n"
    assert re.search(rf"stall: rank 1 on \S+ \(process \d+\) {state} for \d+ s {where}", errors), (
        errors
    )
    assert re.search(
        r"error: rank 1 on \S+ hung for \d+ s, so the job was stopped \(stall_timeout=10\)\.\n",
        errors,
    ), errors
    assert "rank 0 on" not in errors


@pytest.mark.slow
def test_job_whose_rank_does_not_begin_fit_ends(tmp_path):
    done = job("late", tmp_path, 10)
    assert done.returncode == EXIT_STALLED, done.stderr
    line = (
        "error: not all ranks have begun fit within 10 s, so the job was stopped"
        " (stall_timeout=10).\n"
    )
    assert done.stderr.count(line) == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "why"),
    [("killed", 137, r"error: rank 1 on \S+ was killed by signal 9 "), ("raises", 1, "Traceback ")],
)
def test_job_whose_rank_dies_or_raises_ends_with_one_error(kind, code, why, tmp_path):
    words = [*RUN, JOB, kind, "60", str(tmp_path)]
    done = subprocess.run(
        words, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    assert len(re.findall(rf"^{why}", done.stderr, re.MULTILINE)) == 1, done.stderr
    failure = r"^(error: )?rank 1 on \S+ failed: RuntimeError: of rank 1$"
    number_of_lines = 2 if kind == "raises" else 0
    assert len(re.findall(failure, done.stderr, re.MULTILINE)) == number_of_lines, done.stderr
    assert "the connection to another rank is lost" not in done.stderr


@pytest.mark.slow
def test_job_with_generators_of_different_lengths_ends(tmp_path):
    done = job("fewer", tmp_path, 10)
    assert done.returncode == EXIT_STALLED, done.stderr
    # Keras prints this on the rank that has fewer batches.
    assert "Your input ran out of data" in done.stderr
    assert re.search(
        r"stall: rank 0 on \S+ \(process \d+\) has made no progress for \d+ s \(last step: 6\)",
        done.stderr,
    )
    assert "ranks need equal numbers of batches" in done.stderr


@pytest.mark.slow
def test_job_whose_rank_sets_stop_training_alone_ends_at_once(tmp_path):
    done = job("ends", tmp_path, 200)
    assert done.returncode == EXIT_USAGE, done.stderr
    assert re.search(
        r"error: rank 1 on \S+ stopped after step 6 \(stop_training\), but rank 0 on \S+ began",
        done.stderr,
    ), done.stderr


@contextlib.contextmanager
def terminal(*words):
    """Starts a command on a new terminal; yields the process and the terminal's other end."""
    ours, theirs = pty.openpty()
    start = [
        sys.executable,
        "-c",
        "import fcntl, os, sys, termios; os.setsid(); "
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])",
    ]
    process = subprocess.Popen(
        [*start, *words], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment()
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read(fd, until=None):
    """Returns the output of a terminal up to a text, or to its end."""
    output = ""
    # Reading raises OSError when the process has closed the terminal.
    with contextlib.suppress(OSError):
        while until is None or until not in output:
            output += os.read(fd, 4096).decode(errors="replace")
    return output


@pytest.mark.slow
def test_job_after_ctrl_c_ends_all_ranks_and_can_continue(tmp_path, undisturbed):
    with terminal(*RUN, JOB, "slow", "60", str(tmp_path)) as (process, fd):
        read(fd, "epoch 1")
        ranks = processes.descendants(process.pid)
        pressed_at = time.monotonic()
        os.write(fd, b"\x03")
        output = read(fd)
        assert process.wait(30) == 128 + signal.SIGINT
        assert time.monotonic() - pressed_at < 10
    assert "SIGINT: the ranks are asked to end\r\n" in output
    assert "stopped: what the program saved before is kept\r\n" in output
    assert len(ranks) >= 3
    assert not [number for number in ranks if processes.alive(number)]
    assert job("whole", tmp_path).returncode == 0
    np.testing.assert_array_equal(weights(tmp_path), undisturbed)


@pytest.mark.slow
def test_job_restarted_after_sigkill_ends_like_an_undisturbed_one(tmp_path, undisturbed):
    command = program.command(2, "slow", "60", str(tmp_path), start=("-m", "tests.library.fit_job"))
    process = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    while "epoch 2" not in process.stdout.readline():
        assert process.poll() is None
    # Ranks would outlive mpirun and remove their backup, so all processes are killed.
    pids = [process.pid, *processes.descendants(process.pid)]
    for number in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.communicate()
    assert processes.gone_within(pids, 10)
    restarted = job("whole", tmp_path)
    assert restarted.returncode == 0, restarted.stderr
    assert set(re.findall(r"epoch (\d)", restarted.stdout)) <= {"1", "2"}
    np.testing.assert_array_equal(weights(tmp_path), undisturbed)


@namespaces
@pytest.mark.slow
def test_job_on_two_hosts_ends_like_one_on_one_host(tmp_path, undisturbed):
    (tmp_path / "job").mkdir()
    words = [
        *RUN,
        "-H",
        "$HOSTS",
        "--network_interfaces",
        "$INTERFACE",
        JOB,
        "whole",
        "60",
        str(tmp_path / "job"),
    ]
    folder = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    inside = f"cd {ROOT}; {' '.join(words)}"
    done = run(LAB, "--hosts=2", "--slots=1", "--", "bash", "-c", inside, timeout=300, **folder)
    assert done.returncode == 0, done.stdout + done.stderr
    np.testing.assert_array_equal(weights(tmp_path / "job"), undisturbed)
