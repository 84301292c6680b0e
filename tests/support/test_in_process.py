"""A run inside of this process leaves nothing behind that would end it or change what follows."""

import logging
import os
import signal
import sys
import threading

import keras

from tests.support import in_process, program


def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    return handlers, signal.set_wakeup_fd(-1), keras.config.dtype_policy().name, os._exit


def test_a_run_leaves_the_process_as_it_was(tiny_data, tmp_path):
    before, modules = state(), set(sys.modules)
    done = program.train_here(tiny_data, tmp_path / "run", "--epochs=1", "--warmup_epochs=0")
    assert done.returncode == 0, done.stderr
    refused = program.train_here(tiny_data, tmp_path / "run")
    assert refused.returncode == 2
    assert state() == before
    assert modules <= set(sys.modules)  # a second import would make other classes of the same names
    assert logging.getLogger("hybrid_imagenet").handlers == []  # its view is gone
    threads = threading.enumerate()
    assert not [thread for thread in threads if isinstance(thread, threading.Timer) or thread.name == "signals"]


def test_modules_are_absent_inside_alone():
    assert in_process.call(__name__, [], absent=["json.tool"]) == [1, "", ""]
    assert in_process.call(__name__, []) == [0, "", ""]


def main(arguments):
    try:
        import json.tool  # noqa: F401
    except ImportError:
        return 1
    return 0
