"""Tells the loss of another rank, or of the way to it, from other errors of a collective
operation.
"""

from __future__ import annotations

import re
import sys

LINE = "error: the connection to another rank is lost"
"""How the line begins with which a rank ends that has lost another one."""
_WORDS = re.compile(r"Horovod has been shut down|(?:Collective ops is aborted by: )+(.*)")
_TASK = re.compile(r"/job:worker(?:/replica:\d+)?/task:(\d+)")  # TensorFlow's name of a rank
_LONGEST = 200  # characters of a reason


def is_loss(error: BaseException) -> bool:
    """Returns whether an error of a step or another collective says that a rank, or the way to it,
    is gone.
    """
    # What has not been imported has raised nothing: without Horovod, as with TensorFlow's engine,
    # or without both.
    tf, horovod = (sys.modules.get(name) for name in ("tensorflow", "horovod.common.exceptions"))
    if horovod is not None and isinstance(error, horovod.HorovodInternalError):
        return True
    if tf is None or not isinstance(error, tf.errors.OpError):
        return False
    if "Collective ops is aborted" in str(
        error
    ):  # as they are too where one fails on this rank, out of memory say
        return isinstance(
            error, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
        )
    return "Horovod has been shut down" in str(error)


def described(error: BaseException, remedy: str = "; start again with --resume") -> str:
    """Returns the one line on a loss, for a rank that ends with it; `remedy` is its end."""
    found = _WORDS.search(str(error))
    reason = (found[1] or found[0]) if found else type(error).__name__
    reason = _TASK.sub(r"rank \1", reason)
    return (
        f"{LINE} ({reason[:_LONGEST].strip(' :')}); see that rank's own message for the"
        f" cause{remedy}"
    )
