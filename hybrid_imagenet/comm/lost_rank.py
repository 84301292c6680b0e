"""Recognizes errors of a collective operation that mean that another rank was lost."""

from __future__ import annotations

import re
import sys

LOST_RANK_PREFIX = "error: the connection to another rank is lost"
"""Beginning of the line that a rank prints when it ends because it has lost another rank."""
_REASON = re.compile(r"Horovod has been shut down|(?:Collective ops is aborted by: )+(.*)")
# TensorFlow's name of a rank, as in /job:worker/replica:0/task:2.
_TASK_NAME = re.compile(r"/job:worker(?:/replica:\d+)?/task:(\d+)")
_MAX_REASON_LENGTH = 200


def is_lost_rank_error(error: BaseException) -> bool:
    """Returns whether an error says that another rank, or the connection to it, was lost.

    Args:
      error: Raised by a step or another collective operation.
    """
    # A library that has not been imported has raised nothing. This process may run without Horovod,
    # and a launcher without TensorFlow too.
    tensorflow = sys.modules.get("tensorflow")
    horovod_exceptions = sys.modules.get("horovod.common.exceptions")
    if horovod_exceptions is not None and isinstance(
        error, horovod_exceptions.HorovodInternalError
    ):
        return True
    if tensorflow is None or not isinstance(error, tensorflow.errors.OpError):
        return False
    errors = tensorflow.errors
    if "Collective ops is aborted" in str(error):
        # TensorFlow also aborts collectives when one fails on this rank, for example if memory
        # runs out. Then the error has another class.
        return isinstance(
            error, (errors.UnavailableError, errors.AbortedError, errors.CancelledError)
        )
    return "Horovod has been shut down" in str(error)


def lost_rank_message(error: BaseException) -> str:
    """Returns the line that a rank prints when it ends because it has lost another rank.

    Args:
      error: An error for which `is_lost_rank_error` is true.
    """
    match = _REASON.search(str(error))
    reason = type(error).__name__
    if match is not None:
        reason = match[1] or match[0]
    reason = _TASK_NAME.sub(r"rank \1", reason)[:_MAX_REASON_LENGTH].strip(" :")
    return f"{LOST_RANK_PREFIX} ({reason}); see that rank's own message for the cause"
