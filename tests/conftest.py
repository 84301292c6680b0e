"""Options of the test suite."""

import gc
import logging
import os
import signal
import subprocess

import pytest

from hybrid_imagenet.comm.environment import choose_onednn
from hybrid_imagenet.comm.process import ENGINE_VARIABLE
from hybrid_imagenet.resilience.stop_signals import REQUESTS, SIGNALS
from tests.ranks import HOROVODRUN, Pool
from tests.support import program

choose_onednn(os.environ)  # tests in this process run the kernels that programs run
# A shell starts what runs in the background with interrupts ignored; so would all be that tests
# start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _process_state():
    log = logging.getLogger("hybrid_imagenet")
    handlers = [signal.getsignal(number) for number in SIGNALS]
    return {
        "signal handlers": handlers,
        "a request to stop": REQUESTS.stop,
        "log": (list(log.handlers), log.level),
    }


@pytest.fixture(autouse=True)
def nothing_left():
    """Fails the test that leaves what would end or disturb a later one, instead of that one."""
    before = _process_state()
    yield
    assert _process_state() == before


@pytest.fixture(scope="session")
def pools():
    """Pools of 2 and 4 ranks, by size; and of 4 that TensorFlow's own runtime connects.

    A process keeps the engine that it has connected. The ranks start when they are called.
    """
    made = {2: Pool(2), 4: Pool(4), "tensorflow": Pool(4)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """The data set of `program.FLAGS`."""
    return program.make_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture(scope="session")
def undisturbed(tiny_data, tmp_path_factory):
    """A run of two ranks that horovodrun started, if it is installed, and its output; it must not
    be changed.
    """
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    watched = ("--profile_steps=3,5", "--tensorboard", "--max_skipped_steps=5")
    launcher = "horovodrun" if HOROVODRUN.exists() else "mpirun"
    done = program.train(2, tiny_data, run_dir, *watched, *program.METHODS, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done.stdout


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run the long forms of tests")
    parser.addoption("--engine", default="horovod", help="train on ranks that this engine connects")
    parser.addoption(
        "--fast",
        action="store_true",
        help="leave out tests that start another process, such as ranks",
    )


def pytest_configure(config):
    """Heeds --engine."""
    program.ENGINE = config.getoption("--engine")
    if program.ENGINE != "horovod":
        os.environ[ENGINE_VARIABLE] = program.ENGINE  # for programs of their own


def pytest_collection_finish(session):
    """Sets what all modules have imported by now aside from collections of garbage; heeds --fast.

    With --fast, a test or fixture that is about to start a process is skipped there and then.
    Not earlier: some versions of TensorFlow start one when they are imported.
    """
    gc.freeze()
    if session.config.getoption("--fast"):
        subprocess.Popen.__init__ = lambda *arguments, **settings: pytest.skip(
            "starts a process: not with --fast"
        )


def pytest_collection_modifyitems(config, items):
    """Leaves the long forms out unless they are asked for; keeps tests that share something with
    one worker.

    With several workers (`-n 2 --dist loadgroup`), a file's tests go to one, and all files with
    tests that share ranks or the undisturbed run go to the same one: two workers would start these
    twice, and fixtures of such a file too.
    """
    files_with_ranks = {
        item.location[0]
        for item in items
        if not {"pools", "undisturbed"}.isdisjoint(item.fixturenames)
    }
    for item in items:
        file = item.location[0]
        item.add_marker(pytest.mark.xdist_group("ranks" if file in files_with_ranks else file))
    if not config.getoption("--long"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="long form: run with --long"))
