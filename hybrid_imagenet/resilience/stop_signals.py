"""Notes requests to stop by SIGTERM, SIGINT or SIGUSR1, from the start of the program to its end.

Before training there is nothing to save: the first signal ends the process, even inside of a library that waits for
other ranks. From the first step on a request is kept until all ranks follow it (`preemption`) or training is over.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import types

from hybrid_imagenet.errors import EXIT_PREEMPTED
from hybrid_imagenet.resilience.exit_code import announce
from hybrid_imagenet.resilience.launcher import launcher_rank

# SIGUSR1 is the one that mpirun passes on to the ranks without killing them a second later.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Requests:
    """Keeps the requests that signals have made of this process."""

    def __init__(self) -> None:
        """Starts without a request."""
        self.stop = self.installed = False
        self._training = False
        self._leaving = threading.Lock()  # taken once, by the first of the handler and the thread that hears a signal

    def install(self) -> None:
        """Catches the signals, for programs; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.installed = True
        for number in SIGNALS:
            signal.signal(number, self.on_signal)
        # Python calls the function above only between two of its own steps; the thread also while a library waits.
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader, writer), name="signals", daemon=True).start()

    def begin_training(self) -> None:
        """Lets requests wait for the end of a step from now on."""
        self._training = True

    def on_signal(self, number: int, frame: types.FrameType | None) -> None:
        """Takes a request; the second ends the process."""
        if not self._training:
            self._leave()
        if self.stop:
            os._exit(128 + number)
        self.stop = True

    def _listen(self, reader: socket.socket, writer: socket.socket) -> None:
        del writer  # kept open for the signals
        while reader.recv(1):
            if not self._training:
                self._leave()

    def _leave(self) -> None:
        if not self._leaving.acquire(blocking=False):
            return
        if launcher_rank() == 0:
            print("stopped before training began: nothing was saved", file=sys.stderr, flush=True)
        announce(EXIT_PREEMPTED)
        os._exit(EXIT_PREEMPTED)


REQUESTS = Requests()  # signals come to the process, not to a part of it
