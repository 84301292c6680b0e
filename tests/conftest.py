"""Defines the options and the shared fixtures of the test suite."""

import gc
import logging
import os
import signal
import subprocess

import pytest

from hybrid_imagenet.cluster.environment import choose_onednn
from hybrid_imagenet.comm.process import ENGINE_VARIABLE
from hybrid_imagenet.resilience.stop_signals import REQUESTS, SIGNALS
from hybrid_imagenet.training.preflight import CHECKED_VARIABLE
from tests.ranks import HOROVODRUN, Pool
from tests.support import program

# Tests in this process then use the same kernels as programs.
choose_onednn(os.environ)
# A shell starts background jobs with SIGINT ignored, and their children inherit that. Tests that
# interrupt a program need the default.
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
def process_state_is_restored():
    """Fails a test that leaves a signal handler, a stop request or a log handler behind.

    Without this check, a later test would fail instead.
    """
    before = _process_state()
    yield
    assert _process_state() == before


@pytest.fixture(autouse=True)
def _flags_are_not_checked_yet(process_state_is_restored, monkeypatch):
    """Undoes what `hybrid-imagenet run` sets for its ranks if a test calls it in this process.

    It follows `process_state_is_restored`, which must see what `monkeypatch` has undone.
    """
    monkeypatch.setenv(CHECKED_VARIABLE, "")


@pytest.fixture(scope="session")
def pools():
    """Yields pools of 2 and 4 ranks, and one of 4 ranks for TensorFlow's engine.

    A process keeps the engine that connected it first, so each engine needs its own pool. Ranks
    start at the first call.
    """
    pools_by_key = {2: Pool(2), 4: Pool(4), "tensorflow": Pool(4)}
    yield pools_by_key
    for pool in pools_by_key.values():
        pool.close()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Writes the dataset of `program.FLAGS` once."""
    return program.make_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture(scope="session")
def undisturbed(tiny_data, tmp_path_factory):
    """Trains once on two ranks without any disturbance; returns the run directory and the output.

    The ranks are started by horovodrun if it is installed. Tests must not change the run.
    """
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    logging_flags = ("--profile_steps=3,5", "--tensorboard", "--max_skipped_steps=5")
    launcher = "horovodrun" if HOROVODRUN.exists() else "mpirun"
    flags = (*logging_flags, *program.METHODS)
    result = program.train(2, tiny_data, run_dir, *flags, launcher=launcher)
    assert result.returncode == 0, result.stdout + result.stderr
    return run_dir, result.stdout


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run the long forms of tests")
    parser.addoption("--engine", default="horovod", help="train on ranks that this engine connects")
    parser.addoption(
        "--fast",
        action="store_true",
        help="skip tests that start another process, such as ranks",
    )


def pytest_configure(config):
    """Applies --engine."""
    program.ENGINE = config.getoption("--engine")
    if program.ENGINE != "horovod":
        # Programs that tests start in new processes read it from there.
        os.environ[ENGINE_VARIABLE] = program.ENGINE


def pytest_collection_finish(session):
    """Excludes imported modules from garbage collection, and applies --fast.

    With --fast, a test or fixture is skipped at the moment when it starts a process. The patch is
    not installed earlier, because some versions of TensorFlow start a process when imported.
    """
    gc.freeze()
    if session.config.getoption("--fast"):
        subprocess.Popen.__init__ = lambda *arguments, **settings: pytest.skip(
            "starts a process: not with --fast"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Skips slow tests without --long, and assigns tests that share ranks to one worker.

    With several workers (`-n 2 --dist loadgroup`), all tests of a file run in one worker. All files
    whose tests share ranks or the undisturbed run are assigned to the same worker. Otherwise two
    workers would start these ranks and the fixtures of such a file twice. A plugin reads the groups
    in its own hook of this name, so this one comes first.
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


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Prints how a worker that crashed has ended: -9 if the kernel killed it."""
    if error:
        code = node.gateway._io.popen.wait(10)
        print(f"\nworker {node.gateway.id} ended with exit code {code}")
