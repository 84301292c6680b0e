"""Runs a program of the package in a process that has loaded TensorFlow already.

That is a rank of a pool, or the process of the tests. It is enough for results and messages. A test
of signals, or of an exit that ends all ranks, needs a separate process.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

from hybrid_imagenet import main
from hybrid_imagenet.resilience.stop_signals import SIGNALS


def call(module: str, arguments: Sequence[str]) -> list:
    """Calls `main` of a module; returns the exit code, the output and the errors of this rank.

    Args:
      module: Its full name.
      arguments: The command line.
    """
    program = importlib.import_module(module).main
    output = io.StringIO()
    errors = io.StringIO()
    with (
        alone(),
        mock.patch.object(os, "_exit", sys.exit),
        # This limit would last until the end of the process, which continues here.
        mock.patch.object(main, "_limit_wait_for_other_ranks", lambda seconds: None),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = program(list(arguments))
        except SystemExit as leave:
            code = leave.code
    return [code, output.getvalue(), errors.getvalue()]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Restores what a program changes for its whole process."""
    import keras
    import tensorflow as tf
    from tensorflow.python.framework import config

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    policy = keras.config.dtype_policy()
    options = tf.config.optimizer.get_experimental_options()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        config.disable_op_determinism()
        changed = tf.config.optimizer.get_experimental_options()
        tf.config.optimizer.set_experimental_options(dict.fromkeys(changed, True) | options)
        keras.config.set_dtype_policy(policy)
        # This also collects garbage.
        keras.backend.clear_session()
