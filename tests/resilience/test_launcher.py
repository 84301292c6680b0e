"""Tests ranks whose launcher is killed, without TensorFlow: mpirun and horovodrun."""

import os
import signal
import subprocess
import sys

import pytest

from tests.ranks import HOROVODRUN, MPIRUN, ROOT, skip_without_horovod
from tests.support import processes, program

LAUNCHERS = {
    "mpirun": [str(MPIRUN), "--oversubscribe", "-np", "2"],
    "horovodrun, MPI": [str(HOROVODRUN), "--mpi", "-np", "2"],
}


def start(command, folder):
    if command[0] == str(HOROVODRUN):
        skip_without_horovod()
    (folder / "pids").mkdir()
    return subprocess.Popen(
        [*command, sys.executable, "-m", "tests.resilience.following_rank", str(folder / "pids")],
        env=program.environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks_end_after_their_launcher_is_killed(tmp_path, name):
    launcher = start(LAUNCHERS[name], tmp_path)
    ranks = processes.numbers_in(tmp_path / "pids", 2)
    try:
        assert all(map(processes.alive, ranks))
        os.kill(launcher.pid, signal.SIGKILL)
        assert processes.gone_within(ranks, 15)
    finally:
        launcher.wait()
        for rank in ranks:
            if processes.alive(rank):
                os.kill(rank, signal.SIGKILL)


def test_process_without_a_launcher_continues_after_its_shell_is_killed(tmp_path):
    shell = start(["sh", "-c", '"$0" "$@" & wait'], tmp_path)
    [rank] = processes.numbers_in(tmp_path / "pids", 1)
    try:
        os.kill(shell.pid, signal.SIGKILL)
        shell.wait()
        assert not processes.gone_within([rank], 3)
    finally:
        os.kill(rank, signal.SIGKILL)


def test_horovodrun_with_an_unreachable_host_prints_one_line():
    skip_without_horovod()
    command = [
        str(HOROVODRUN),
        "-np",
        "2",
        "--disable-cache",
        "-H",
        "no-such-host.invalid:2",
        "true",
    ]
    result = subprocess.run(command, env=program.environment(), capture_output=True, text=True)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ") and "no-such-host.invalid is out of reach" in line
