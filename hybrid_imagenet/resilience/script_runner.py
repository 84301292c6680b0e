"""Runs a script of the user as one rank of a job.

Usage: `python -P -m hybrid_imagenet.resilience.script_runner SCRIPT ARGUMENTS`

The script runs as if Python had started it directly. If it fails before it calls `hi.init()`, for
example at an import, or if it calls `sys.exit`, the supervisor of the job learns which rank has
ended and why. `-P` keeps the current directory out of the module search path, as it is for a script
that Python starts directly.
"""

from __future__ import annotations

import atexit
import builtins
import pathlib
import sys
import types
from collections.abc import Sequence

from hybrid_imagenet.comm import process


def main(words: Sequence[str]) -> None:
    """Runs the script that the first word names, with the other words as its arguments."""
    path = pathlib.Path(words[0])
    # As in Python, the name of the file keeps symbolic links, but its directory does not.
    script = str(path.absolute())
    sys.argv = list(words)
    sys.path.insert(0, str(path.resolve().parent))
    # It is registered first, so that it runs last.
    atexit.register(process.exit_after_failure)
    process.install_excepthook()
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    try:
        exec(compile(path.read_bytes(), script, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as end:
        process.report_system_exit(end)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
