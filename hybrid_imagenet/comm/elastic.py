"""Prepares for ranks that come and go, under `horovodrun --min-np --max-np --host-discovery-script`.

Horovod's launcher restarts no run: it tells the ranks of changed hosts and, once every rank that is left has asked to
connect anew, gives out new numbers. What a rank does meanwhile is up to it; see `resilience.elastic`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

from hybrid_imagenet.comm.settings import Settings
from hybrid_imagenet.errors import UserError

_MAX_FUSION_MB = 64  # half of Horovod's own buffer, see `engine._set_engine`
# What Horovod can be told only once per process: a second start with it set writes outside of its memory.
_ONCE = {"HOROVOD_CYCLE_TIME": "--cycle-time-ms", "HOROVOD_FUSION_THRESHOLD": "--fusion-threshold-mb"}
_CONNECT_SECONDS = "120"  # for new ranks to start Python and TensorFlow while the others wait
# Of connections on which nothing comes back: first question, further ones, their number; and the end in milliseconds.
# Later than the launcher's ssh gives a host up (20 s, `tools.run`): it hands the old numbers to ranks that come before,
# which then wait for the lost rank until Gloo's own time-out.
_LOSS = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 25_000,
}


class RanksChangeError(Exception):
    """Hosts have come or go; every rank raises it after the same step, with its state committed."""


def enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether the launcher expects ranks to come and go."""
    return (os.environ if environ is None else environ).get("HOROVOD_ELASTIC") == "1"


def prepare(settings: Settings) -> None:
    """Checks what cannot be had with changing ranks, and sets how long ranks wait for each other.

    Raises:
      UserError: for settings that Horovod cannot start with twice, or whose sets of ranks are fixed.
    """
    for name, option in _ONCE.items():
        if name in os.environ:
            raise UserError(
                f"{name} is set (horovodrun {option}): elastic ranks cannot connect again with it, unset it"
            )
    if settings.engine != "horovod":
        raise UserError(f"--engine={settings.engine} cannot be used with elastic ranks: leave it out")
    if settings.allreduce != "ring":
        raise UserError(f"--allreduce={settings.allreduce} cannot be used with elastic ranks: use --allreduce=ring")
    if settings.cycle_time_ms is not None:
        raise UserError(f"--cycle_time_ms={settings.cycle_time_ms:g} cannot be set with elastic ranks: leave it out")
    if settings.fusion_threshold_mb > _MAX_FUSION_MB:
        raise UserError(
            f"--fusion_threshold_mb={settings.fusion_threshold_mb:g}: at most {_MAX_FUSION_MB} with elastic ranks"
        )
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", _CONNECT_SECONDS)


def watch_connections() -> None:
    """Has the kernel end this process's connections to hosts that are lost, after some 25 seconds.

    A host that loses its network closes nothing: Gloo would wait for its full time-out, which is long enough for new
    ranks to start. Hosts that are only busy answer by their kernel.
    """
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            connection.getpeername()  # OSError for a socket that listens
            for option, value in _LOSS.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class HostWatch:
    """Hears from the launcher that hosts have come or go. It tells rank 0 only."""

    def __init__(self) -> None:
        """Opens the port on which the launcher tells; call it after Horovod has started."""
        from horovod.common.elastic import notification_manager

        self._pending = False
        self._callback: Callable[[], None] | None = None
        notification_manager.init()
        notification_manager.register_listener(self)

    def call(self, callback: Callable[[], None]) -> None:
        """Calls back, from another thread, when hosts change; at once if they have since `forget`."""
        self._callback = callback
        if self._pending:
            callback()

    def forget(self) -> None:
        """Forgets the changes up to now: the ranks are about to connect anew."""
        self._pending, self._callback = False, None

    def on_hosts_updated(self, timestamp: float, result: typing.Any) -> None:
        """Notes a change; Horovod's thread calls it."""
        self._pending = True
        if self._callback is not None:
            self._callback()
