"""Imports TensorFlow without its greeting.

TensorFlow prints the greeting before any log level that can be set applies.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from hybrid_imagenet.cluster.job_lines import JOB_VARIABLE
from hybrid_imagenet.errors import missing_tensorflow_message


def import_tensorflow() -> None:
    """Imports TensorFlow without its greeting, unless it is imported already.

    Ranks of a job with a supervisor print it, but the supervisor drops it
    (`resilience.launcher_output`).

    Raises:
      ModuleNotFoundError: If TensorFlow is not installed, with the remedy.
    """
    if "tensorflow" in sys.modules:
        return
    # The threads of a rank that has a supervisor write lines to it through file descriptor 2.
    has_supervisor = JOB_VARIABLE in os.environ
    with contextlib.nullcontext() if has_supervisor else _native_stderr_dropped():
        try:
            import tensorflow  # noqa: F401
        except ModuleNotFoundError as missing:
            if missing.name != "tensorflow":
                raise
            raise ModuleNotFoundError(missing_tensorflow_message(), name="tensorflow") from None


@contextlib.contextmanager
def _native_stderr_dropped() -> Iterator[None]:
    """Drops what libraries write to file descriptor 2 inside the context.

    `sys.stderr` still writes to the original standard error, because a watchdog may report there
    that the import hangs.
    """
    python_stderr = sys.stderr
    python_stderr.flush()
    with open(os.dup(2), "w", buffering=1, errors="backslashreplace") as original:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        sys.stderr = original
        try:
            yield
        finally:
            sys.stderr = python_stderr
            os.dup2(original.fileno(), 2)
