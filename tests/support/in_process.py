"""A program of the package inside of a process that has TensorFlow already, of a pool or of the
tests themselves.

What a process of its own would show, an exit that ends all ranks and signals, needs one; results
and messages do not.
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
      module: its full name.
      arguments: the command line.
    """
    program = importlib.import_module(module).main
    output, errors = io.StringIO(), io.StringIO()
    with (
        alone(),
        mock.patch.object(os, "_exit", sys.exit),
        # It lasts until the end of the process, which continues here.
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
    """Puts back what a program changes for its whole process."""
    import keras
    from tensorflow.python.framework import config

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    policy = keras.config.dtype_policy()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        config.disable_op_determinism()
        keras.config.set_dtype_policy(policy)
        keras.backend.clear_session()  # it collects garbage too
