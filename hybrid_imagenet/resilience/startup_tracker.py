"""Reports ranks that lag behind the others while a job starts.

The watchdog cannot do this, because it needs connected ranks. Instead each rank writes its startup
stage to standard error, in a line that begins with the secret word of the job, whenever the stage
changes and every few seconds. The supervisor removes these lines from what the user sees, as it
does with exit codes (`exit_code`).
"""

from __future__ import annotations

import os
import re
import select
import socket
from collections.abc import Sequence
from typing import NamedTuple

from hybrid_imagenet.cluster import job_lines
from hybrid_imagenet.errors import pluralize, printable
from hybrid_imagenet.resilience.stacks import main_stack

# How often a rank sends its stage.
NOTIFY_INTERVAL_SECONDS = 10.0
# How long ranks may be silent, or behind the first one.
_PATIENCE_SECONDS = 30.0
_MAX_NAMED_RANKS = 3
_MAX_FRAME_LENGTH = 255
# Stage of a rank whose startup is over.
_OVER = "over"
_STAGE_LINE = re.compile(
    rb" at (?P<rank>\d{1,6}) of (?P<size>\d{1,6}) on (?P<host>\S{1,255}) (?P<process>\d{1,9})"
    rb"\t(?P<stage>[^\t\n]{0,99})\t(?P<frame>[^\t\n]*)"
)


_HUNG_LINE = re.compile(
    rb" hung (?P<seconds>\d{1,9}) (?P<stall_timeout>[\d.e+]{1,20})"
    rb"\t(?P<stage>[^\t\n]{0,99})\t(?P<message>[^\t\n]+)"
)
# Stages in which no rank waits for another one.
_LOADING_STAGE_PREFIX = "loading "


class _RankStage(NamedTuple):
    host: str
    process: int
    stage: str
    frame: str
    received: float


class StartupTracker:
    """Keeps the startup stage of each rank of a job, in the supervisor.

    Times are in seconds on the supervisor's monotonic clock.
    """

    def __init__(self, rank_hosts: Sequence[str] = ()):
        """Stores the host of each rank, as far as the launcher's command line shows it."""
        self._rank_hosts = rank_hosts
        self._ranks: dict[int, _RankStage] = {}
        self._size = 0
        # When the first rank reached each stage, in the order of these times.
        self._reached: dict[str, float] = {}
        self._reported_ranks: set[int] = set()
        # Stages of ranks whose end has been reported.
        self._hung_stages: set[str] = set()

    @property
    def any_rank_started(self) -> bool:
        """Whether a rank has sent its stage."""
        return bool(self._ranks)

    def record(self, text: bytes, now: float) -> bool:
        """Stores a rank's stage; returns False for any other kind of line.

        Args:
          text: A line of standard error after the job's word.
          now: When it was read.
        """
        match = _STAGE_LINE.match(text)
        if match is None:
            return False
        rank = int(match["rank"])
        stage = match["stage"].decode(errors="replace")
        self._size = max(int(match["size"]), rank + 1)
        self._ranks[rank] = _RankStage(
            host=match["host"].decode(errors="replace"),
            process=int(match["process"]),
            stage=stage,
            frame=match["frame"].decode(errors="replace"),
            received=now,
        )
        self._reached.setdefault(stage, now)
        return True

    def report_hung_rank(self, text: bytes) -> str | None:
        """Returns a line about a rank that ends because its stage has taken too long.

        If one rank reaches the limit, others in the same stage soon do, so only the first is
        reported.

        Args:
          text: A line of standard error after the job's word.

        Returns:
          The line; "" if a rank in the same stage was reported before; None if `text` is another
          kind of line.
        """
        match = _HUNG_LINE.match(text)
        if match is None:
            return None
        stage = match["stage"].decode(errors="replace")
        if stage in self._hung_stages:
            return ""
        self._hung_stages.add(stage)
        stages = [rank.stage for rank in self._ranks.values()]
        all_ranks_load = stage.startswith(_LOADING_STAGE_PREFIX) and set(stages) == {stage}
        if all_ranks_load and len(stages) == self._size > 1:
            return (
                f"error: all {self._size} ranks are still {stage} after {match['seconds'].decode()}"
                " s, because the hosts or their file system are slow, so the job was stopped"
                f" (--stall_timeout={match['stall_timeout'].decode()}). Raise --stall_timeout.\n"
            )
        return f"{match['message'].decode(errors='replace')}\n"

    def report_late_ranks(self, now: float) -> str:
        """Returns lines about ranks that are silent or behind the first one for too long.

        Returns "" if there are none, or none that were not reported before.
        """
        if not self._reached or _OVER in self._reached:
            return ""
        stage, since = list(self._reached.items())[-1]
        late = []
        if now - since > _PATIENCE_SECONDS:
            late = [rank for rank in range(self._size) if self._is_late(rank, stage, now)]
        # If all ranks are silent, the cause is not one of them. An import, for example, can keep
        # the interpreter of every rank busy.
        if len(late) == self._size:
            return ""
        new_ranks = set(late) - self._reported_ranks
        self._reported_ranks = set(late)
        # When thousands of ranks arrive one by one, each check finds fewer of them. That is not
        # worth a line.
        if not new_ranks:
            return ""
        subjects = [self._describe(rank, now) for rank in late[:_MAX_NAMED_RANKS]]
        if len(late) > _MAX_NAMED_RANKS:
            subjects.append(pluralize(len(late) - _MAX_NAMED_RANKS, "more rank"))
        return "".join(
            f"stall: {subject}; others have been {stage} for {now - since:.0f} s\n"
            for subject in subjects
        )

    def _is_late(self, rank: int, stage: str, now: float) -> bool:
        latest = self._ranks.get(rank)
        if latest is None:
            return True
        return latest.stage != stage or now - latest.received > _PATIENCE_SECONDS

    def _describe(self, rank: int, now: float) -> str:
        latest = self._ranks.get(rank)
        if latest is None:
            host = ""
            if rank < len(self._rank_hosts):
                host = f" on {printable(self._rank_hosts[rank])}"
            return f"rank {rank}{host} has not started"
        return (
            f"rank {rank} on {printable(latest.host)} (process {latest.process}) was heard"
            f" {now - latest.received:.0f} s ago, {latest.stage}, in {printable(latest.frame)}"
        )


def notify_stage(rank: int, size: int, stage: str | None) -> None:
    """Sends this rank's stage to its supervisor, if the supervisor is ready to read it.

    Args:
      rank: This process's number.
      size: Number of ranks.
      stage: The startup stage, or None when startup is over.
    """
    # A pipe that is ready takes at least PIPE_BUF bytes at once, which is more than a line has. So
    # the rank never waits for its supervisor.
    _, writable, _ = select.select([], [2], [], 0)
    if not writable:
        return
    frames = (frame for frame in main_stack() if not frame.startswith("<"))
    frame = next(frames, "")[-_MAX_FRAME_LENGTH:]
    shown_stage = _OVER if stage is None else stage or "starting"
    job_lines.notify_supervisor(
        f"at {rank} of {size} on {socket.gethostname()} {os.getpid()}"
        f"\t{shown_stage}\t{printable(frame)}"
    )


def hung_line(message: str, stage: str, seconds: float, stall_timeout: float) -> str:
    """Returns the last line of a rank that ends because its stage has taken too long.

    Args:
      message: What a user sees if this is the only such rank, or if there is no supervisor.
      stage: The startup stage.
      seconds: How long the stage has taken.
      stall_timeout: --stall_timeout in seconds.
    """
    line = job_lines.supervisor_line(
        f"hung {seconds:.0f} {stall_timeout:g}\t{stage}\t{printable(message)}"
    )
    return line or message
