"""`hybrid-imagenet stop RUN`: asks a run to save and stop, as Ctrl-C in its terminal does."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hybrid_imagenet.runlog import state
from hybrid_imagenet.tools import command_line, status

_LOOK_SECONDS = 0.5


def _run(arguments: Sequence[str]) -> None:
    description = "Asks a run on this host to save and stop, and waits until it has."
    directory = status.directory_of("stop", description, arguments)
    state.stop(directory)
    while state.lock_holder(directory) is not None:
        time.sleep(_LOOK_SECONDS)
    print("\n".join(status.lines(directory)))


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code (see `hybrid_imagenet.errors`)."""
    return command_line.run(_run, arguments)
