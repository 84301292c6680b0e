"""Imports TensorFlow without its greeting, which it writes before any log level that can be set
applies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from hybrid_imagenet.errors import missing_tensorflow_message

GREETINGS = (
    r"^WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR",
    r" port\.cc:[0-9]*\] oneDNN custom operations are on\.",
    r"\] This TensorFlow binary is optimized to use available CPU instructions",
    r"^To enable the following instructions:",
)
"""Lines of TensorFlow on standard error, as regular expressions of grep and of Python."""


def import_tensorflow() -> None:
    """Imports TensorFlow unless that is done. HYBRID_IMAGENET_TF_LOG=1 shows its greeting too."""
    if "tensorflow" not in sys.modules:
        with without_lines(GREETINGS):
            try:
                import tensorflow  # noqa: F401
            except ModuleNotFoundError as missing:
                if missing.name != "tensorflow":
                    raise
                raise ModuleNotFoundError(missing_tensorflow_message(), name="tensorflow") from None


@contextlib.contextmanager
def without_lines(patterns: tuple[str, ...]) -> Iterator[None]:
    """Drops lines from what is written to file descriptor 2 inside.

    Another process copies all other lines at once: they appear whatever becomes of this process.
    """
    grep = shutil.which("grep")
    if grep is None or os.environ.get("HYBRID_IMAGENET_TF_LOG") == "1":
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    copy = subprocess.Popen(
        [grep, "--line-buffered", "-avE", "|".join(patterns)],
        stdin=subprocess.PIPE,
        stdout=kept,
        env=os.environ | {"LC_ALL": "C"},  # any bytes
        start_new_session=True,  # a Ctrl-C on the terminal is not for it
    )
    assert copy.stdin is not None
    os.dup2(copy.stdin.fileno(), 2)
    copy.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # a child of this process may keep it open
            copy.wait(1)
