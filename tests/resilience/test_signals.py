"""Tests signals to ranks and a killed launcher, with the whole program."""

import os
import signal
import subprocess
import sys

import pytest

from hybrid_imagenet.resilience.step_requests import StepRequests
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from tests.ranks import ROOT
from tests.support import processes, program

# A small network, because these tests are only about how a run ends.
SMALL = ("--model=resnet8", "--model_width=4", "--image_size=8")


def test_signal_becomes_a_request_to_all_ranks():
    requests = StepRequests(None)
    REQUESTS.begin()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        processes.wait_for(lambda: REQUESTS.stop)
        requests.post()
        requests.follow()
        assert (requests.stop, requests.save) == (True, False)
    finally:
        REQUESTS.end()
    # A notebook may train again.
    assert not REQUESTS.stop


@pytest.mark.parametrize(
    # Python ends a process with 1 after KeyboardInterrupt. "None" is a child that still runs.
    ("number", "code"),
    [
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGINT, 1),
        (signal.SIGUSR1, None),
        (signal.SIGHUP, None),
    ],
)
def test_signal_to_a_forked_child_is_no_request_to_its_parent(number, code):
    """Keras ends the processes of a PyDataset by SIGTERM, and mpirun sends SIGUSR1 to all."""
    program = (
        "import multiprocessing, os, time\n"
        "from hybrid_imagenet.resilience.stop_signals import REQUESTS\n"
        "REQUESTS.begin()\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "child.start()\n"
        "time.sleep(0.5)\n"
        f"os.kill(child.pid, {number.value})\n"
        "child.join(2)\n"
        "time.sleep(0.2)\n"
        "print(child.exitcode, REQUESTS.stop)\n"
        "child.kill()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == f"{code} False\n", result.stderr


def run_signaled(*names, **options):
    command = [sys.executable, "-m", "tests.resilience.signalled", *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_second_signal_prints_how_the_run_ends_and_third_ends_it(name, code):
    result = run_signaled(name, name, name, name)
    assert (result.returncode, result.stdout) == (code, "True\n" * 2), result.stderr
    first, second, third = result.stderr.splitlines()
    assert f"{name}: the run saves" in first
    assert "still waiting" in second
    assert "ended at once" in third


def test_sighup_and_sigusr1_repeated_do_not_end_the_run_at_once():
    result = run_signaled("SIGHUP", "SIGHUP", "SIGUSR1", "SIGUSR1", "SIGTERM")
    assert (result.returncode, result.stdout) == (0, "True\n" * 5), result.stderr
    assert result.stderr.count("\n") == 2


def test_sighup_under_nohup_is_ignored():
    result = run_signaled("SIGHUP", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert (result.returncode, result.stdout, result.stderr) == (0, "False\n", "")


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_signal_before_training_ends_a_rank_that_waits_for_others(name, code):
    process = processes.python(
        *("-m", "tests.resilience.waiting_start"),
        *("--recipe=hybrid", "--dataset=digits", "--augmentation=digits"),
    )
    assert "waiting\n" in iter(process.stdout.readline, "")
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert errors == "stopped before the first step: nothing new to save\n"


def run_train_process(preparation):
    """Runs a process whose command returns 75 at once, unless the preparation changes that."""
    code = f"""
import os, signal, time
from hybrid_imagenet import __main__ as program
from hybrid_imagenet.cluster import environment

class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGTERM):
        kill(process, number)

program.main = lambda words: 75
{preparation}
raise SystemExit(program.run_process(["train"]))
"""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_signal_during_a_restart_with_huge_pages_is_not_lost():
    waits = "program.main = lambda words: time.sleep(30)"
    result = run_train_process(f"environment.restart_with_huge_pages = Late().__del__; {waits}")
    assert (result.returncode, result.stderr) == (
        75,
        "stopped before the first step: nothing new to save\n",
    )


def test_signal_during_shutdown_does_not_change_the_exit_code():
    result = run_train_process("environment.restart_with_huge_pages = lambda: None; late = Late()")
    assert (result.returncode, result.stderr) == (75, "")


def test_signal_after_the_last_checkpoint_loses_no_result(tiny_data, tmp_path):
    flags = (
        *program.FLAGS,
        *SMALL,
        f"--data_dir={tiny_data}",
        f"--run_dir={tmp_path}/run",
        "--epochs=1",
    )
    process = processes.python(
        "-m", "tests.resilience.interrupted_end", *flags, env=program.environment()
    )
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    assert "stopped after the last step: the run is complete" in errors
    assert (tmp_path / "run" / "summary.json").exists()
