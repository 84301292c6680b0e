"""Imports TensorFlow without its greeting.

TensorFlow prints the greeting before any log level that can be set applies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from hybrid_imagenet.errors import missing_tensorflow_message

TENSORFLOW_GREETINGS = (
    r"^WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR",
    r" port\.cc:[0-9]*\] oneDNN custom operations are on\.",
    r"\] This TensorFlow binary is optimized to use available CPU instructions",
    r"^To enable the following instructions:",
)
"""Lines of TensorFlow on standard error, as regular expressions of grep and of Python."""


def import_tensorflow() -> None:
    """Imports TensorFlow without its greeting, unless it is imported already.

    HYBRID_IMAGENET_TF_LOG=1 shows the greeting.

    Raises:
      ModuleNotFoundError: If TensorFlow is not installed, with the remedy.
    """
    if "tensorflow" in sys.modules:
        return
    with filter_stderr(TENSORFLOW_GREETINGS):
        try:
            import tensorflow  # noqa: F401
        except ModuleNotFoundError as missing:
            if missing.name != "tensorflow":
                raise
            raise ModuleNotFoundError(missing_tensorflow_message(), name="tensorflow") from None


@contextlib.contextmanager
def filter_stderr(patterns: tuple[str, ...]) -> Iterator[None]:
    """Drops lines that this process writes to file descriptor 2 inside the context.

    A separate process, grep, copies all other lines at once, so they appear even if this process
    crashes.

    Args:
      patterns: Regular expressions of grep; lines that match one are dropped.
    """
    grep = shutil.which("grep")
    if grep is None or os.environ.get("HYBRID_IMAGENET_TF_LOG") == "1":
        yield
        return
    sys.stderr.flush()
    original_stderr = os.dup(2)
    grep_process = subprocess.Popen(
        [grep, "--line-buffered", "-avE", "|".join(patterns)],
        stdin=subprocess.PIPE,
        stdout=original_stderr,
        # In this locale grep accepts any bytes.
        env=os.environ | {"LC_ALL": "C"},
        # Ctrl-C on the terminal must not end grep before the last line is copied.
        start_new_session=True,
    )
    assert grep_process.stdin is not None
    os.dup2(grep_process.stdin.fileno(), 2)
    grep_process.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original_stderr, 2)
        os.close(original_stderr)
        # A child of this process may keep the pipe open, and then grep does not end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            grep_process.wait(1)
