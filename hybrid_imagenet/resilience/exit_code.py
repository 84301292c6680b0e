"""Tells the launcher with which code a rank ends, where the launcher's own exit code would hide it.

`python -m hybrid_imagenet run` and the launch scripts give each job a word of its own in the
environment. A rank writes it with its exit code on standard error, a line that the supervisor of
the job takes out: mpirun and horovodrun carry what ranks print over any network, but pass exit
codes on in a few cases only.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from typing import NamedTuple

from hybrid_imagenet.comm.job_lines import JOB_VARIABLE, tell
from hybrid_imagenet.errors import EXIT_STALLED

__all__ = ["JOB_VARIABLE", "End", "announce", "end_with_line", "find", "tell"]

_PRINTING = 5.0  # seconds for a line to be printed before the process ends
_UNSAVED = "unsaved"


class End(NamedTuple):
    """What a line of standard error says of the end of a rank.

    Attributes:
      code: its exit code.
      saved: false if a signal ended it before there was something to save.
    """

    code: int
    saved: bool


def announce(code: int, environ: Mapping[str, str] | None = None, *, saved: bool = True) -> None:
    """Writes the line at the end of a rank that has a supervisor; does nothing in other
    processes.
    """
    tell(f"ends {code}{'' if saved else f' {_UNSAVED}'}", environ)


def end_with_line(text: str) -> None:
    """Prints a line, announces EXIT_STALLED and ends this process, also if nobody reads what it
    prints.
    """
    timer = threading.Timer(_PRINTING, os._exit, (EXIT_STALLED,))
    timer.daemon = True
    timer.start()
    print(text, file=sys.stderr, flush=True)
    announce(EXIT_STALLED)
    os._exit(EXIT_STALLED)


def find(text: bytes) -> End | None:
    """Returns the end that is announced by what follows the job's word in a line; None for anything
    else.
    """
    found = re.match(rb" ends (\d{1,3})\b( %s)?" % _UNSAVED.encode(), text)
    return End(int(found[1]), not found[2]) if found else None
