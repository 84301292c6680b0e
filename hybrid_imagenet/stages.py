"""Says on one rank what a start is doing, stage by stage, and how long each stage took the last time.

Open to every room, as a start goes through many. Silent until the program opens it; a library's user never sees it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

STARTED_VARIABLE = "HYBRID_IMAGENET_STARTED"
"""Seconds since 1970 at which the command began that has started the ranks."""
LAUNCHING = "starting the ranks"
_LONGEST = 3600.0  # seconds for which a launcher's word counts: an older one is another command's
_KEPT = 40  # kinds of runs in the file
_TICK = 0.5


def remembered() -> pathlib.Path:
    """The file in which the seconds of each stage are kept, by kind of run: [seconds, CPU seconds of rank 0]."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base, "hybrid_imagenet", "start.json")


class Stages:
    """Shows the stages of a start: a line that is rewritten on a terminal, a line for each elsewhere."""

    def __init__(self) -> None:
        """Shows nothing before `open`."""
        self._stream: TextIO | None = None
        self._lock = threading.Lock()

    def open(self, kind: str, stream: TextIO, *, terminal: bool) -> None:
        """Begins, with the title of the run.

        Args:
          kind: what is started; runs of one kind take about as long.
          stream: where to write.
          terminal: whether to rewrite one line there.
        """
        self._stream, self._terminal, self._kind = stream, terminal, kind
        self._known = _read().get(kind, {})
        self._took: dict[str, list[float]] = {}
        self._stage, self._closed = "", threading.Event()
        self._time, self._cpu = time.time(), time.process_time()
        self._began = command_start(self._time)
        if self._began < self._time:
            self._took[LAUNCHING] = [self._time - self._began, 0.0]
        total = sum(seconds for seconds, _ in self._known.values())
        self._write(kind + (f": the first step takes about {total:.0f} s" if total else ""))
        if terminal:
            threading.Thread(target=self._tick, name="stages", daemon=True).start()

    def begin(self, stage: str) -> None:
        """Ends the stage before and shows this one."""
        if self._stream is None:
            return
        self._end()
        with self._lock:
            self._stage = stage
            if not self._terminal:
                known = self._known.get(stage)
                self._write(f"{stage} ..." + (f" ({known[0]:.0f} s the last time)" if known else ""))

    def finish(self) -> None:
        """Ends the start: the first step is done. Keeps the seconds for the next start of this kind."""
        if self._stream is None:
            return
        self._end()
        with self.quiet():
            self._closed.set()
        parts = ", ".join(f"{stage} {seconds:.1f} s" for stage, (seconds, _) in self._took.items())
        self._write(f"first step after {time.time() - self._began:.1f} s: {parts}")
        self._stream = None
        _keep(self._kind, self._took)

    def close(self) -> None:
        """Ends the start without a first step."""
        if self._stream is not None:
            with self.quiet():
                self._closed.set()
            self._stream = None

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Clears the line of a terminal for what is printed inside."""
        with self._lock:
            if self._stream is not None and self._terminal and not self._closed.is_set():
                self._stream.write("\r\x1b[K")
                self._stream.flush()
            yield

    def _end(self) -> None:
        now, cpu = time.time(), time.process_time()
        if self._stage:
            before = self._took.get(self._stage, [0.0, 0.0])
            self._took[self._stage] = [before[0] + now - self._time, before[1] + cpu - self._cpu]
        self._time, self._cpu = now, cpu

    def _tick(self) -> None:
        closed = self._closed
        while not closed.wait(_TICK):
            with self._lock:
                if self._stage and not closed.is_set() and self._stream is not None:
                    known = self._known.get(self._stage)
                    of = f" of about {known[0]:.0f} s" if known else " s"
                    self._stream.write(f"\r\x1b[K{self._stage} ... {time.time() - self._time:.0f}{of}")
                    self._stream.flush()

    def _write(self, line: str) -> None:
        assert self._stream is not None
        self._stream.write(line + "\n")
        self._stream.flush()


def _read() -> dict[str, dict[str, list[float]]]:
    """Returns what earlier starts took; nothing if the file cannot be read."""
    try:
        found = json.loads(remembered().read_text())
        return {
            str(kind): {str(stage): [float(wall), float(cpu)] for stage, (wall, cpu) in stages.items()}
            for kind, stages in found.items()
        }
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):  # RuntimeError: no home directory
        return {}


def _keep(kind: str, took: dict[str, list[float]]) -> None:
    """Writes what this start took; a cache that cannot be written is no loss."""
    rest = {other: stages for other, stages in _read().items() if other != kind}
    newest = dict(list(rest.items())[1 - _KEPT :]) | {kind: took}
    with contextlib.suppress(OSError, RuntimeError):
        path = remembered()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(newest))
        temporary.replace(path)


START = Stages()
"""Of this process."""


def on_terminal(progress: str, ranks: int) -> bool:
    """Whether what rank 0 writes to standard output comes to a terminal, under --progress.

    Open MPI gives every rank a pseudo-terminal, whatever it writes to itself; so a rank believes in a terminal only if
    the launcher, which sees the real one, says so.
    """
    if progress != "auto":
        return progress == "live"
    if ranks > 1:
        return os.environ.get("HYBRID_IMAGENET_TERMINAL", "0") != "0"
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def command_start(now: float) -> float:
    """Returns when the command that started the ranks began, in seconds since 1970; `now` if that is not known."""
    began = float(os.environ.get(STARTED_VARIABLE) or now)
    return began if 0 <= now - began < _LONGEST else now


def command_began() -> None:
    """Notes for the ranks that the command that starts them has begun."""
    os.environ.setdefault(STARTED_VARIABLE, f"{time.time():.3f}")
