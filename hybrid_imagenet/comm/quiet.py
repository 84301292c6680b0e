"""Keeps TensorFlow's greeting off the terminal: it is written before any log level that can be set applies."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_GREETINGS = re.compile(
    rb"^WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|oneDNN custom operations are on\."
    rb"|This TensorFlow binary is optimized to use available CPU instructions"
    rb"|^To enable the following instructions:"
)


@contextlib.contextmanager
def without_greeting() -> Iterator[None]:
    """Holds back what is written to file descriptor 2 inside, and lets through all lines but the known greetings.

    Whatever happens inside, the other lines appear when it ends. Set HYBRID_IMAGENET_TF_LOG=1 to see everything.
    """
    if os.environ.get("HYBRID_IMAGENET_TF_LOG") == "1":
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not _GREETINGS.search(line)))
